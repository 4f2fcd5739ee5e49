#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(AccumulateScores, AddsWhereTheSetsAre) {
  const auto memory = at::tensor({0, 3, 4, 1, 2, -1}, at::kInt).view({1, 2, 3});
  const auto colsum = at::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F}).view({1, 2, 3});
  for (const auto type : {at::kFloat, at::kDouble}) {
    auto scores = at::ones({1, 2, 5}, type);
    accumulate_scores_(scores, memory, colsum.to(type));
    const auto expected = at::tensor({2.0, 1.0, 1.0, 3.0, 4.0, 1.0, 5.0, 6.0, 1.0, 1.0}, type);
    EXPECT_TRUE(same(scores, expected.view({1, 2, 5})));
  }
}

TEST(AccumulateScores, ViewsOfLargerBuffers) {
  const auto memory = positions({0, 2, 5, -1}, 2, 3);
  const auto colsum = at::rand({2, 3, 4});
  auto expected = at::rand({2, 3, 6});
  for (const bool heads_apart : {false, true}) {
    auto buffer = heads_apart ? at::zeros({2, 5, 9}).narrow(1, 1, 3) : at::zeros({2, 3, 9});
    auto scores = buffer.narrow(2, 1, 6).copy_(expected);
    accumulate_scores_(scores, memory, colsum);
    for (int64_t i = 0; i < 3; ++i) {
      const int64_t position = memory[0][0][i].item<int64_t>();
      EXPECT_TRUE(close(scores.select(2, position),
                        expected.select(2, position) + colsum.select(2, i), 1e-6));
    }
    EXPECT_TRUE(same(scores.select(2, 3), expected.select(2, 3)));
    EXPECT_EQ(buffer.select(2, 0).abs().sum().item<float>(), 0);
    EXPECT_EQ(buffer.narrow(2, 7, 2).abs().sum().item<float>(), 0);
  }
}

TEST(AccumulateScores, Nothing) {
  auto scores = at::rand({1, 2, 5});
  const auto before = scores.clone();
  accumulate_scores_(scores, at::empty({1, 2, 0}, at::kInt), at::empty({1, 2, 0}));
  accumulate_scores_(scores, positions({-1, -1}, 1, 2), at::full({1, 2, 2}, std::nan("")));
  EXPECT_TRUE(same(scores, before));
  auto none = at::empty({1, 2, 0});
  accumulate_scores_(none, positions({-1}, 1, 2), at::ones({1, 2, 1}));
}

TEST(AccumulateScores, WrongArguments) {
  auto scores = at::ones({1, 2, 8});
  const auto memory = positions({1, 2}, 1, 2);
  const auto colsum = at::ones({1, 2, 2});
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(scores, memory.to(at::kLong), colsum),
                          "memory must be int32, got int64");
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(scores, memory, colsum.to(at::kDouble)),
                          "colsum must have dtype and device of scores");
  EXPECT_VALUE_ERROR(accumulate_scores_(scores, memory, colsum.narrow(2, 0, 1)),
                     "colsum must have the shape of memory [1, 2, 2], got [1, 2, 1]");
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(scores, memory.narrow(1, 0, 1), colsum),
                          "memory must have the KV heads (2)");
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(scores, memory, scores.narrow(2, 6, 2)),
                          "colsum must not share memory with scores");
  auto expanded = at::ones({1, 1, 8}).expand({1, 2, 8});
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(expanded, memory, colsum),
                          "scores must have every element at an address of its own");
}

TEST(AccumulateScores, PositionOutOfRange) {
  auto scores = at::ones({1, 1, 8});
  const auto colsum = at::ones({1, 1, 2});
  EXPECT_VALUE_ERROR(accumulate_scores_(scores, positions({1, 8}), colsum),
                     "memory must be -1 or in [0, 8), got 8");
  EXPECT_VALUE_ERROR(accumulate_scores_(scores, positions({3, 3}), colsum),
                     "memory must be strictly ascending, got 3 after 3");
  EXPECT_TRUE(same(scores, at::ones({1, 1, 8})));
}

}  // namespace
}  // namespace h2o_prefill::testing
