// Runs the tests of the operators over the CUDA operators and the emulated kernels. Fresh tensors
// hold NaN, so that unwritten memory is seen. With the argument --hopper, and
// without H2O_PREFILL_CUDA_SM90=0 in the environment, the kernels for sm_90a run.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string_view>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/cuda_kernels.h"

namespace {

bool is_hopper = false;

TEST(CudaKernels, TheEnvironmentChoosesTheKernels) {
  EXPECT_STREQ(h2o_prefill::cuda_kernels().arch, is_hopper ? "sm_90a" : "sm_80");
}

}  // namespace

int main(int argc, char** argv) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(true);
  ::testing::InitGoogleTest(&argc, argv);
  is_hopper = argc > 1 && std::string_view(argv[1]) == "--hopper";
  if (is_hopper) {
    cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
  }
  return RUN_ALL_TESTS();
}
