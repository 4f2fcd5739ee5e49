// Chooses the instruction set of the CPU kernels, once a process; AMX only while oneDNN is enabled.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/amx_gemm.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/cpu_features.h"

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
H2O_DECLARE_ISA(neon_bf16)
#else
H2O_DECLARE_ISA(scalar)
#endif

namespace {

// Fastest first, but for sets with products of bfloat16, which not every CPU runs fast.
std::vector<CpuKernels> all_kernels() {
#if defined(H2O_HAVE_X86_ISAS)
  CpuKernels amx = avx512_bf16::kCpuKernels;
  amx.isa = "amx";
  amx.gemm = amx_gemm;
  amx.gemm_release = amx_release;
  return {amx, avx512_bf16::kCpuKernels, avx512::kCpuKernels, avx2::kCpuKernels,
          scalar::kCpuKernels};
#elif defined(__aarch64__)
  return {neon_bf16::kCpuKernels, neon::kCpuKernels};
#else
  return {scalar::kCpuKernels};
#endif
}

bool is_supported(const CpuKernels& kernels) {
  if (kernels.gemm) return cpu_has("avx512_bf16") && amx_available();
  return cpu_has(kernels.isa);
}

CpuKernels named(const std::string& name) {
  std::string known;
  for (const CpuKernels& kernels : all_kernels()) {
    if (name == kernels.isa) {
      if (is_supported(kernels)) return kernels;
      throw std::runtime_error("H2O_PREFILL_ISA=" + name + " is not supported by this CPU");
    }
    known += (known.empty() ? "" : ", ") + std::string(kernels.isa);
  }
  throw std::runtime_error("H2O_PREFILL_ISA must be one of " + known + ", got " + name);
}

CpuKernels fastest() {
  for (const CpuKernels& kernels : all_kernels()) {
    const bool is_fast =
        !kernels.bfloat16_products || kernels.gemm || cpu_has_fast_bfloat16_products();
    if (is_fast && is_supported(kernels)) return kernels;
  }
  throw std::runtime_error("this CPU runs none of the compiled instruction sets");
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels chosen = [] {
    const char* name = std::getenv("H2O_PREFILL_ISA");
    return name && *name ? named(name) : fastest();
  }();
  // Users turn oneDNN off at any time, and AMX with it.
  static const CpuKernels without_amx = chosen.gemm ? named("avx512_bf16") : chosen;
  return chosen.gemm && !amx_enabled() ? without_amx : chosen;
}

}  // namespace h2o_prefill
