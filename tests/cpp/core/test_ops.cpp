// The functions of ops.h hand every argument to their operators. What those compute is compared
// with the reference in Python.
#include "h2o_prefill/ops.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kLength = 40;
constexpr int64_t kRows = 13;

TEST(Ops, AttentionEqualsMaskedSoftmax) {
  const auto x = random_qkv(kLength);
  const auto inside = attend(x, chunk_mask(kLength, 16));
  const auto [out, lse, colsum] = intra_chunk_attention(x.q, x.k, x.v, 16);
  EXPECT_TRUE(close(out, inside.out) && close(lse, inside.lse) && close(colsum, inside.colsum));

  const auto indices = positions({2, 30, -1}, 2, 2);
  const auto few = attend(x, membership(indices, kLength).unsqueeze(2));
  const auto [mem_out, mem_lse, votes] = memory_attention(x.q, x.k, x.v, indices);
  EXPECT_TRUE(close(mem_out, few.out) && close(mem_lse, few.lse));
  EXPECT_TRUE(close(votes.sum(2), few.colsum.sum(2)));

  const auto last = x.call(kLength - kRows, kLength);
  EXPECT_TRUE(close(dense_attention(last.q, last.k, last.v), attend_causally(last).out));
  const auto sinks = at::arange(4, at::kFloat);
  const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
  EXPECT_TRUE(close(dense_attention(last.q, last.k, last.v, 0.5, sinks, 1.5),
                    dense_attention(wide(last.q), wide(last.k), wide(last.v), 0.5, sinks, 1.5)));
  const auto window = attend(last, causal_mask(kRows, kLength).triu(kLength - kRows - 9));
  const auto seen = sliding_window_attention(last.q, last.k, last.v, 10);
  EXPECT_TRUE(close(std::get<0>(seen), window.out) && close(std::get<1>(seen), window.lse));

  const auto nothing = at::full_like(lse, -kInfinity);
  EXPECT_TRUE(close(std::get<0>(merge_states(out, lse, mem_out, nothing)), out));
}

TEST(Ops, MemoryOfScores) {
  auto scores = at::tensor({0., 3., 1., 3., 2., 0.}, at::kFloat).view({1, 1, 6});
  const auto memory = select_memory(scores, at::empty({1, 1, 0}, at::kInt), 0, 6, 1, 2, 1);
  EXPECT_TRUE(same(memory, positions({0, 1, 3, 5})));
  accumulate_scores_(scores, memory, at::ones({1, 1, 4}));
  EXPECT_TRUE(same(scores.flatten(), at::tensor({1., 4., 1., 4., 2., 1.}, at::kFloat)));
  const auto rows = scores.unsqueeze(3);
  EXPECT_TRUE(same(gather_rows(rows, memory).flatten(), at::tensor({1., 4., 4., 1.}, at::kFloat)));
}

}  // namespace
}  // namespace h2o_prefill::testing
