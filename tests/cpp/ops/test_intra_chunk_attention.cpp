#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kChunkSize = 16;

TEST(IntraChunkAttention, EqualsMaskedSoftmax) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t kv_heads : {4, 2, 1}) {
      for (const int64_t length : {1, 15, 17, 60}) {
        const auto x = random_qkv(length, 4, kv_heads, type);
        const auto expected = attend(x, chunk_mask(length, kChunkSize));
        const auto [out, lse, colsum] = intra_chunk_attention(x.q, x.k, x.v, kChunkSize);
        EXPECT_TRUE(close(out, expected.out, 1e-5 + 2 * rounding_error(expected.out, type)))
            << length << " tokens, " << kv_heads << " KV heads of " << type;
        EXPECT_TRUE(close(lse, expected.lse));
        EXPECT_TRUE(close(colsum, expected.colsum, 2e-5));
        EXPECT_EQ(out.scalar_type(), type);
        EXPECT_EQ(lse.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
        EXPECT_EQ(colsum.scalar_type(), lse.scalar_type());
      }
    }
  }
}

TEST(IntraChunkAttention, ReadsAnyStrides) {
  const auto x = random_qkv(20);
  const auto expected = std::get<0>(intra_chunk_attention(x.q, x.k, x.v, kChunkSize));
  for (const auto& order : {by_token, by_dim}) {
    EXPECT_TRUE(
        same(std::get<0>(intra_chunk_attention(order(x.q), order(x.k), order(x.v), kChunkSize)),
             expected));
  }
}

TEST(IntraChunkAttention, NoTokens) {
  const auto x = random_qkv(0);
  const auto [out, lse, colsum] = intra_chunk_attention(x.q, x.k, x.v, kChunkSize);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
  EXPECT_EQ(lse.sizes(), at::IntArrayRef({2, 4, 0}));
  EXPECT_EQ(colsum.sizes(), at::IntArrayRef({2, 2, 0}));
}

}  // namespace
}  // namespace h2o_prefill::testing
