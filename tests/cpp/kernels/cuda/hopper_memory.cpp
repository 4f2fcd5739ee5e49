// The shared memory of the emulated device: Hopper's, unless its kernels are not to run.
#include <cstdlib>
#include <string>

#include "cuda_emulation/counters.h"

namespace {

[[maybe_unused]] const size_t max_shared_bytes = [] {
  const char* const hopper = std::getenv("H2O_PREFILL_CUDA_SM90");
  if (hopper == nullptr || hopper != std::string("0")) {
    cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
  }
  return cuda_emulation::max_shared_bytes;
}();

}  // namespace
