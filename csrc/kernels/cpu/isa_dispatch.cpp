// Chooses the instruction set of the CPU kernels, once a process.
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/cpu/attend_rows.h"

namespace h2o_prefill {

#define H2O_DECLARE_ISA(isa)           \
  namespace isa {                      \
  extern const CpuKernels kCpuKernels; \
  }
H2O_DECLARE_ISA(scalar)
#ifdef H2O_HAVE_X86_ISAS
H2O_DECLARE_ISA(avx2)
H2O_DECLARE_ISA(avx512)
#endif

namespace {

struct Candidate {
  const CpuKernels* kernels;
  bool supported;
};

// Widest first.
auto candidates() {
#ifdef H2O_HAVE_X86_ISAS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  return std::array{Candidate{&avx512::kCpuKernels, avx512}, Candidate{&avx2::kCpuKernels, avx2},
                    Candidate{&scalar::kCpuKernels, true}};
#else
  return std::array{Candidate{&scalar::kCpuKernels, true}};
#endif
}

const CpuKernels& choose() {
  const char* wanted = std::getenv("H2O_PREFILL_ISA");
  std::string known;
  for (const Candidate& candidate : candidates()) {
    const std::string name = candidate.kernels->isa;
    if (!wanted || !*wanted) {
      if (candidate.supported) return *candidate.kernels;
      continue;
    }
    if (name == wanted) {
      if (!candidate.supported)
        throw std::runtime_error("H2O_PREFILL_ISA=" + name + " is not supported by this CPU");
      return *candidate.kernels;
    }
    known += (known.empty() ? "" : ", ") + name;
  }
  throw std::runtime_error("H2O_PREFILL_ISA must be one of " + known + ", got " +
                           std::string(wanted));
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace h2o_prefill
