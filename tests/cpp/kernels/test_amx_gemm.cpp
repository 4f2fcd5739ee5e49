// Products by AMX: amx_gemm, and attend_rows with it. PyTorch has the same products for CPUs that
// have bfloat16 instructions but not AMX, so both are tested there too.
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

// c[m, n] (+)= a[m, k] b[k, n] against the definition; rows of a and c are further apart than long.
std::string product_difference(int64_t m, int64_t n, int64_t k, bool add) {
  Random random(static_cast<uint32_t>(m + n + k));
  Rows a(DType::kBFloat16, m, k, 6);
  Rows b(DType::kBFloat16, k / 2, 2 * n);  // [k / 2][n][2]
  Rows c(DType::kFloat32, m, n, 5);
  random.fill(a, 1.0);
  random.fill(b, 1.0);
  std::vector<double> expected;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double before = static_cast<double>(i - j);
      if (add) c.set(i, j, before);  // else NaN, which must not stay
      double sum = add ? before : 0.0;
      for (int64_t l = 0; l < k; ++l) sum += a.get(i, l) * b.get(l / 2, 2 * j + l % 2);
      expected.push_back(sum);
    }
  }
  amx_gemm(m, n, k, a.stride(), n, c.stride(), add, a.data(), b.data(),
           static_cast<float*>(c.data()));
  if (!c.gaps_untouched()) return "written between rows";
  const std::vector<double> got = c.numbers();
  return difference("product", m * n, got, [&](int64_t i) { return expected[i]; });
}

TEST_F(AmxGemm, MultipliesAndAdds) {
  const int64_t n = avx512_bf16::kCpuKernels.panel;
  for (const int64_t m : {1, 6, 8, 32}) {
    for (const int64_t k : {2, 64, 80, 256}) {
      EXPECT_EQ(product_difference(m, n, k, false), "") << m << ", " << k;
      EXPECT_EQ(product_difference(m, n, k, true), "") << m << ", " << k << ", added";
    }
  }
}

// The same as with the kernel's own tiles. Logits are exact both ways, so that all probabilities
// are rounded to the same bfloat16, and only the order of the sums over keys differs.
TEST_F(AmxGemm, AttendsAsTheTilesDo) {
  const CpuKernels& kernels = avx512_bf16::kCpuKernels;
  for (const int64_t head_dim : {7, 64, 80, 128}) {
    for (const int64_t count : {33, 200, 600}) {
      ProblemSpec spec{"gemm", DType::kBFloat16, DType::kFloat32, 70, head_dim, 80, 0.1F, {}};
      spec.sets = {{count, causal_limits(70, count)}, {45}};
      spec.gap = 3;
      spec.exact_products = true;
      const Problem problem = make_problem(spec);
      const Outcome tiles = run(kernels, problem), gemm = run(kernels, problem, amx_gemm);
      const auto same = [](const auto& a, const auto& b, int64_t n) {
        return difference("entry", n, a, [&](int64_t i) { return b[i]; });
      };
      SCOPED_TRACE(std::to_string(head_dim) + ", keys " + std::to_string(count));
      EXPECT_EQ(same(gemm.out.numbers(), tiles.out.numbers(), 70 * 80), "");
      EXPECT_EQ(same(gemm.lse, tiles.lse, 70), "");
      EXPECT_EQ(same(gemm.colsum[0], tiles.colsum[0], count), "");
      EXPECT_EQ(mistakes(kernels, problem, solve(problem), gemm), "");
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace h2o_prefill
