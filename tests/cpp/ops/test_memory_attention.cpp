#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kLength = 40;

// Another set for every batch row and head, some shorter than others.
at::Tensor ragged_sets() {
  return at::tensor(std::vector<int32_t>{0, 3,  7,  20, 39, 1, 2,  38, -1, -1,
                                         5, -1, -1, -1, -1, 9, 10, 11, 12, 13},
                    at::kInt)
      .view({2, 2, 5});
}

TEST(MemoryAttention, EqualsMaskedSoftmax) {
  const auto indices = ragged_sets();
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf}) {
    auto x = random_qkv(kLength, 6, 2, type);
    x.q = x.q.slice(2, 0, 13);  // queries and keys differ in number
    const auto expected = attend(x, membership(indices, kLength).unsqueeze(2));
    const auto [out, lse, colsum] = memory_attention(x.q, x.k, x.v, indices);
    EXPECT_TRUE(close(out, expected.out, 1e-5 + 2 * rounding_error(expected.out, type)));
    EXPECT_TRUE(close(lse, expected.lse));
    const auto at_sets =
        expected.colsum.gather(2, indices.clamp_min(0).to(at::kLong)).masked_fill(indices.lt(0), 0);
    EXPECT_TRUE(close(colsum, at_sets));
    EXPECT_EQ(colsum.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
  }
}

TEST(MemoryAttention, WithoutAKeyOutputIsZeroAndLseMinusInfinity) {
  const auto x = random_qkv(kLength);
  for (const auto& indices : {at::empty({2, 2, 0}, at::kInt), positions({-1, -1, -1}, 2, 2)}) {
    const auto [out, lse, colsum] = memory_attention(x.q, x.k, x.v, indices);
    EXPECT_TRUE(same(out, at::zeros({2, 4, kLength, kValueDim})));
    EXPECT_TRUE(same(lse, at::full({2, 4, kLength}, -kInfinity, at::kFloat)));
    EXPECT_TRUE(same(colsum, at::zeros(indices.sizes())));
  }
}

TEST(MemoryAttention, IgnoresWhatItIsNotToldToRead) {
  const auto x = random_qkv(kLength, 4, 2, at::kFloat, 1);
  const auto indices = positions({2, 30, -1}, 1, 2);
  const auto expected = memory_attention(x.q, x.k, x.v, indices);
  auto k = at::full_like(x.k, std::nan("")), v = at::full_like(x.v, std::nan(""));
  for (const int64_t row : {2, 30}) {
    k.select(2, row).copy_(x.k.select(2, row));
    v.select(2, row).copy_(x.v.select(2, row));
  }
  const auto poisoned = memory_attention(x.q, k, v, indices);
  EXPECT_TRUE(same(std::get<0>(poisoned), std::get<0>(expected)));
  EXPECT_TRUE(same(std::get<2>(poisoned), std::get<2>(expected)));
}

}  // namespace
}  // namespace h2o_prefill::testing
