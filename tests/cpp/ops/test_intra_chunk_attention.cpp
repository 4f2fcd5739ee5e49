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

TEST(IntraChunkAttention, AChunkMayBeLongerThanAnyHistory) {
  const auto x = random_qkv(20);
  for (const int64_t size : {int64_t{20}, int64_t{1} << 40}) {
    const auto [out, lse, colsum] = intra_chunk_attention(x.q, x.k, x.v, size);
    const auto expected = attend(x, chunk_mask(20, 20));
    EXPECT_TRUE(close(out, expected.out) && close(lse, expected.lse));
    EXPECT_TRUE(close(colsum, expected.colsum));
  }
}

TEST(IntraChunkAttention, ScaleReplacesTheDefault) {
  auto x = random_qkv(20);
  const auto out = std::get<0>(intra_chunk_attention(x.q, x.k, x.v, kChunkSize, 0.5));
  x.q = x.q * (0.5 * std::sqrt(8.0));
  EXPECT_TRUE(close(out, attend(x, chunk_mask(20, kChunkSize)).out));
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

TEST(IntraChunkAttention, WrongArguments) {
  const auto x = random_qkv(20);
  EXPECT_VALUE_ERROR(intra_chunk_attention(x.q, x.k, x.v, 0), "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q[0], x.k, x.v, kChunkSize),
                          "q must have 4 dimensions");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q.slice(1, 0, 3), x.k, x.v, kChunkSize),
                          "got 3 and 2");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q.slice(2, 0, 9), x.k, x.v, kChunkSize),
                          "k must have the length of q");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q, x.k.slice(3, 0, 4), x.v, kChunkSize),
                          "k must have the head dim of q");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q.to(at::kInt), x.k, x.v, kChunkSize),
                          "q must be float32");
  EXPECT_VALUE_ERROR_WITH(intra_chunk_attention(x.q, x.k.to(at::kHalf), x.v, kChunkSize),
                          "k must have dtype and device of q (float32 on cpu), got float16");
}

}  // namespace
}  // namespace h2o_prefill::testing
