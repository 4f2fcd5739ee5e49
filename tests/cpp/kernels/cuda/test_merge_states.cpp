// Fusion of partial results against float64, in every dtype and alignment.
#include "kernels/cuda/merge_states.h"

#include <gtest/gtest.h>

#include "kernels/cuda/attention.h"

namespace h2o_prefill::testing {
namespace {

// What a side without keys holds is not read: it is NaN.
void check(DType dtype, int64_t dim, int64_t gap) {
  SCOPED_TRACE(name_of(dtype) + ", head dim " + std::to_string(dim) + ", gap " +
               std::to_string(gap));
  constexpr int64_t kBatch = 2, kHeads = 3, kLength = 11, kRows = kBatch * kHeads * kLength;
  const auto heads = [&] {
    return Heads(dtype, kBatch, kHeads, kLength, dim, /*transposed=*/true, gap);
  };
  Heads sides[] = {heads(), heads()}, out = heads();
  std::vector<float> lse_of[] = {std::vector<float>(kRows), std::vector<float>(kRows)};
  std::vector<float> lse(kRows, std::nanf(""));
  Random random(3);
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t at = out.row(row / kLength / kHeads, row / kLength % kHeads, row % kLength);
    for (const int side : {0, 1}) {
      const bool empty = row % 5 == 1 + side || row % 5 == 3;
      const double far = side == 0 && row % 7 == 0 ? 1e4 : 0.0;
      lse_of[side][row] = empty ? -HUGE_VALF : static_cast<float>(far + random.uniform(-20, 20));
      for (int64_t d = 0; d < dim && !empty; ++d) {
        sides[side].rows.set(at, d, random.uniform(-3, 3));
      }
    }
  }
  ASSERT_EQ(launch_merge_states({sides[0].view(), sides[1].view(), out.view(), lse_of[0].data(),
                                 lse_of[1].data(), lse.data()},
                                nullptr),
            cudaSuccess);
  EXPECT_TRUE(out.rows.gaps_untouched());
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t at = out.row(row / kLength / kHeads, row / kLength % kHeads, row % kLength);
    const double total = log_sum_exp({lse_of[0][row], lse_of[1][row]});
    if (total == -HUGE_VAL) {
      ASSERT_EQ(lse[row], -HUGE_VALF);
    } else {
      ASSERT_NEAR(lse[row], total, 1e-6 * std::max(1.0, std::fabs(total)));
    }
    for (int64_t d = 0; d < dim; ++d) {
      double expected = 0.0;
      for (const int side : {0, 1}) {
        if (lse_of[side][row] == -HUGE_VALF) continue;
        expected += std::exp(lse_of[side][row] - total) * sides[side].rows.get(at, d);
      }
      // Distances of logits carry the rounding of their float32 values.
      ASSERT_NEAR(out.rows.get(at, d), expected,
                  rounding(dtype) * std::max(1.0, std::fabs(expected)) + 1e-5)
          << "row " << row << ", element " << d;
    }
  }
}

TEST(MergeStates, AgreesWithFloat64) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {1, 8, 13, 64, 80, 256, 264}) {
      for (const int64_t gap : {0, 1, 8}) check(dtype, dim, gap);
    }
  }
}

TEST(MergeStates, NoRows) {
  MergeStatesParams params{};
  params.out.heads = params.out.batch = 1;
  params.out.dim = 8;
  EXPECT_EQ(launch_merge_states(params, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace h2o_prefill::testing
