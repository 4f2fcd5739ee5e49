// Whether this CPU runs what was compiled for an instruction set. Include it only where no wide
// instructions are compiled.
#pragma once

#include <string>

namespace h2o_prefill::testing {

inline bool cpu_has(const std::string& isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return avx2;
  if (isa == "avx512") return avx512;
  if (isa == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return isa == "scalar" || isa == "neon";
}

}  // namespace h2o_prefill::testing
