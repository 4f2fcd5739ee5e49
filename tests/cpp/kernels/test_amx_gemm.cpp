// attend_rows with products by AMX. PyTorch has the same products for CPUs that have bfloat16
// instructions but not AMX, so they are tested there too.
#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include "kernels/attend_run.h"
#include "kernels/cpu/amx_gemm.h"
#include "kernels/cpu/cpu_features.h"

namespace h2o_prefill {

namespace avx512_bf16 {
extern const CpuKernels kCpuKernels;
}

namespace testing {
namespace {

class AmxGemm : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu_has("avx512_bf16")) GTEST_SKIP() << "this CPU does not have avx512_bf16";
    amx_available();  // where there is AMX, asks the kernel for it
    try {
      const std::vector<uint16_t> zeros(32 * 32);
      std::vector<float> product(32 * 32);
      amx_gemm(32, 32, 32, 32, 32, 32, false, zeros.data(), zeros.data(), product.data());
    } catch (const c10::Error& error) {
      GTEST_SKIP() << "PyTorch does not multiply bfloat16 here: " << error.what_without_backtrace();
    }
  }

  void TearDown() override { amx_release(); }
};

TEST_F(AmxGemm, Attends) {
  const CpuKernels& kernels = avx512_bf16::kCpuKernels;
  for (const int64_t head_dim : {7, 64, 80, 128}) {
    for (const int64_t count : {33, 200, 600}) {
      ProblemSpec spec{"gemm", DType::kBFloat16, DType::kFloat32, 70, head_dim, 80, 0.1F, {}};
      spec.sets = {{count, causal_limits(70, count)}, {45}};
      spec.gap = 3;
      const Problem problem = make_problem(spec);
      const Outcome outcome = run(kernels, problem, amx_gemm);
      EXPECT_EQ(mistakes(kernels, problem, solve(problem), outcome), "")
          << head_dim << ", keys " << count;
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace h2o_prefill
