// The instruction sets of this CPU. Include it only where no wide instructions are compiled.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __aarch64__
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include <cstring>
#include <string>
#include <string_view>

namespace h2o_prefill {

struct CpuModel {
  std::string_view vendor = {};  // as CPUID leaf 0 spells it
  int family = 0;                // extended family included
};

// Whether dot products of bfloat16 (AVX512_BF16) run faster than multiply-adds of float32, which
// the feature bit does not say. A table instead of a measurement at start-up: processes on one
// machine must round alike.
//
//   AMD, family 0x19 (Zen 4) and later  vdpbf16ps at the rate of an FMA, with twice its work (by
//                                       AMD's numbers)
//   Intel, Cooper Lake and later        87 to 99 GFLOP/s a core against 176 to 223 in float32
//                                       (measured, Emerald Rapids): only AMX is faster
constexpr bool has_fast_bfloat16_products(const CpuModel& cpu) {
  constexpr int kZen4 = 0x19;
  return cpu.vendor == "AuthenticAMD" && cpu.family >= kZen4;
}

// The CPU of this process: vendor and family from CPUID. On Arm the feature bit decides.
inline bool cpu_has_fast_bfloat16_products() {
#ifdef __x86_64__
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  char vendor[12];
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return false;
  std::memcpy(vendor, &ebx, 4);
  std::memcpy(vendor + 4, &edx, 4);
  std::memcpy(vendor + 8, &ecx, 4);
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned family = (eax >> 8) & 0xF, extended = (eax >> 20) & 0xFF;
  return has_fast_bfloat16_products(
      {.vendor = {vendor, sizeof(vendor)},
       .family = static_cast<int>(family == 0xF ? family + extended : family)});
#else
  return true;
#endif
}

// Whether it runs code that was compiled with the flags of an instruction set (see
// cmake/isa.cmake).
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
#elif defined(__aarch64__)
  if (isa == "neon_bf16") return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
  return isa == "scalar" || isa == "neon";  // the compiler's baseline
}

// What of this CPU a compiler makes use of that compiles for it (-march=native), in Inductor's
// names where it has some: " AVX2 FMA ...". Of SVE with the length of its vectors, which code may
// assume.
inline std::string cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define H2O_IF(feature, name) (__builtin_cpu_supports(feature) ? " " name : "")
  return std::string(cpu_has("avx512") ? " AVX512" : "") + H2O_IF("avx2", "AVX2") +
         H2O_IF("fma", "FMA") + H2O_IF("f16c", "F16C") + H2O_IF("bmi2", "BMI2") +
         H2O_IF("gfni", "GFNI") + H2O_IF("avxvnni", "AVX_VNNI") +
         H2O_IF("avx512vnni", "AVX512_VNNI") + H2O_IF("avx512bf16", "AVX512_BF16") +
         H2O_IF("avx512fp16", "AVX512_FP16") + H2O_IF("avx512vbmi", "AVX512_VBMI") +
         H2O_IF("avx512vbmi2", "AVX512_VBMI2") + H2O_IF("avx512bitalg", "AVX512_BITALG") +
         H2O_IF("avx512vpopcntdq", "AVX512_VPOPCNTDQ") + H2O_IF("amx-tile", "AMX_TILE") +
         H2O_IF("amx-bf16", "AMX_BF16") + H2O_IF("amx-int8", "AMX_INT8");
#undef H2O_IF
#elif defined(__aarch64__)
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const auto bits = 8 * (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK);
  return std::string(first & HWCAP_ASIMD ? " ASIMD" : "") + (first & HWCAP_ATOMICS ? " LSE" : "") +
         (first & HWCAP_ASIMDHP ? " FP16" : "") + (first & HWCAP_ASIMDDP ? " DOTPROD" : "") +
         (second & HWCAP2_BF16 ? " BF16" : "") + (second & HWCAP2_I8MM ? " I8MM" : "") +
         (second & HWCAP2_SVE2 ? " SVE2" : "") +
         (first & HWCAP_SVE ? " SVE" + std::to_string(bits) : "");
#else
  return "";
#endif
}

}  // namespace h2o_prefill
