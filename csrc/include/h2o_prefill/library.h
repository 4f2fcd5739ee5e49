// The library itself: loading and build facts.
#pragma once

#include <string>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Forces the shared library to be linked and loaded, so that torch.ops.h2o_prefill.* and
// torch.classes.h2o_prefill.* are registered. A program that only loads TorchScript modules calls
// this; calling it twice does nothing. Throws std::runtime_error if the environment variable
// H2O_PREFILL_ISA names an instruction set that this library or this CPU does not have, which would
// otherwise stop the first operator that runs on the CPU.
H2O_API void init();

// The version of the library, "major.minor.patch".
H2O_API std::string version();

// Whether CUDA kernels were compiled in.
H2O_API bool has_cuda();

// The instruction set that the CPU kernels of this process run with: on x86 "amx", "avx512_bf16",
// "avx512", "avx2" or "scalar", on Arm "neon_bf16" or "neon", elsewhere "scalar".
H2O_API std::string cpu_isa();

}  // namespace h2o_prefill
