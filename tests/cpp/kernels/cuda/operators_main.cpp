// Runs the tests of the operators over the CUDA operators and the emulated kernels. Fresh tensors
// hold NaN, so that what nothing wrote is seen. With the argument --hopper the device has the
// shared memory of sm_90a.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string_view>

#include "cuda_emulation/counters.h"

int main(int argc, char** argv) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(true);
  ::testing::InitGoogleTest(&argc, argv);
  if (argc > 1 && std::string_view(argv[1]) == "--hopper") {
    cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
  }
  return RUN_ALL_TESTS();
}
