// Chooses the instruction set of the CPU kernels, once a process.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/amx_gemm.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/bfloat16_probe.h"

namespace h2o_prefill {

#define H2O_DECLARE_ISA(isa)           \
  namespace isa {                      \
  extern const CpuKernels kCpuKernels; \
  }
#if defined(H2O_HAVE_X86_ISAS)
H2O_DECLARE_ISA(scalar)
H2O_DECLARE_ISA(avx2)
H2O_DECLARE_ISA(avx512)
H2O_DECLARE_ISA(avx512_bf16)
#elif defined(__aarch64__)
H2O_DECLARE_ISA(neon)
#else
H2O_DECLARE_ISA(scalar)
#endif

namespace {

struct Candidate {
  CpuKernels kernels;
  bool supported;
};

// Widest first. All that follow the first supported one without bfloat16 products are slower.
std::vector<Candidate> candidates() {
#if defined(H2O_HAVE_X86_ISAS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  CpuKernels amx = avx512_bf16::kCpuKernels;
  amx.isa = "amx";
  amx.gemm = amx_gemm;
  amx.gemm_release = amx_release;
  return {{amx, bf16 && amx_available()},
          {avx512_bf16::kCpuKernels, bf16},
          {avx512::kCpuKernels, avx512},
          {avx2::kCpuKernels, avx2},
          {scalar::kCpuKernels, true}};
#elif defined(__aarch64__)
  return {{neon::kCpuKernels, true}};
#else
  return {{scalar::kCpuKernels, true}};
#endif
}

CpuKernels choose() {
  const char* wanted = std::getenv("H2O_PREFILL_ISA");
  std::string known;
  std::vector<CpuKernels> with_bfloat16;
  for (const Candidate& candidate : candidates()) {
    const CpuKernels& kernels = candidate.kernels;
    const std::string name = kernels.isa;
    if (!wanted || !*wanted) {
      if (!candidate.supported) continue;
      if (!kernels.bfloat16_products) return fastest_in_bfloat16(kernels, with_bfloat16);
      with_bfloat16.push_back(kernels);
      continue;
    }
    if (name == wanted) {
      if (!candidate.supported)
        throw std::runtime_error("H2O_PREFILL_ISA=" + name + " is not supported by this CPU");
      return kernels;
    }
    known += (known.empty() ? "" : ", ") + name;
  }
  throw std::runtime_error("H2O_PREFILL_ISA must be one of " + known + ", got " +
                           std::string(wanted));
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels chosen = choose();
  return chosen;
}

}  // namespace h2o_prefill
