// The C++ functions of operators that have one implementation for every device or run on the host.
// Tests of the Python package compare these operators with the oracle.
#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(MergeStates, EqualsOneSoftmaxOverBothKeySets) {
  const auto x = random_qkv(30);
  const auto in_first = at::arange(30).remainder(3) == 0;
  const auto first = attend(x, in_first), second = attend(x, in_first.logical_not());
  const auto all = attend(x, at::ones({30}, at::kBool));
  const auto [out, lse] = merge_states(first.out, first.lse, second.out, second.lse);
  EXPECT_TRUE(close(out, all.out) && close(lse, all.lse));
}

TEST(GatherRows, CopiesRowsOfEveryHead) {
  const auto x = at::randn({2, 3, 10, 5});
  const auto got = gather_rows(x, positions({7, -1, 0}, 2, 3));
  EXPECT_TRUE(same(got.select(2, 0), x.select(2, 7)) && same(got.select(2, 2), x.select(2, 0)));
  EXPECT_TRUE(same(got.select(2, 1), at::zeros({2, 3, 5})));
}

TEST(ChunkwiseLinearAttention, ContinuesFromAState) {
  const auto x = random_qkv(70);
  const LinearAttentionOptions options{.chunk_size = 16, .normalize = true};
  const auto attend = [&](int64_t begin, int64_t end, const LinearState& state) {
    const auto t = x.tokens(begin, end);
    return chunkwise_linear_attention(t.q, t.k, t.v, {}, state, options);
  };
  const auto [whole, last] = attend(0, 70, {});
  const auto [first, state] = attend(0, 33, {});
  const auto [second, end] = attend(33, 70, state);
  EXPECT_TRUE(close(at::cat({first, second}, 2), whole, 1e-4));
  EXPECT_TRUE(close(end.state, last.state, 1e-4) && close(end.normalizer, last.normalizer, 1e-4));
}

TEST(AccumulateScores, RefusesWhatItCannotAddInPlace) {
  auto scores = at::ones({1, 2, 8});
  const auto memory = positions({1, 2}, 1, 2);
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(scores, memory, scores.narrow(2, 6, 2)),
                          "colsum must not share memory with scores");
  auto expanded = at::ones({1, 1, 8}).expand({1, 2, 8});
  EXPECT_VALUE_ERROR_WITH(accumulate_scores_(expanded, memory, at::ones({1, 2, 2})),
                          "scores must have every element at an address of its own");
  EXPECT_TRUE(same(scores, at::ones({1, 2, 8})));
}

}  // namespace
}  // namespace h2o_prefill::testing
