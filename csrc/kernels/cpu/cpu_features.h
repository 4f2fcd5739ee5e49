// What this CPU can run. Include it only where no wide instructions are compiled.
#pragma once

#include <string_view>

namespace h2o_prefill {

// Whether it runs what was compiled with the flags of an instruction set (see cmake/isa.cmake).
inline bool cpu_has(std::string_view isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return avx2;
  if (isa == "avx512") return avx512;
  if (isa == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return isa == "scalar" || isa == "neon";  // the compiler's baseline
}

}  // namespace h2o_prefill
