// Attention that is dense, in chunks, over a memory set and in a window, on the CPU and on the
// emulation of CUDA.
#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kChunkSize = 16;
constexpr int64_t kLength = 40;

TEST(DenseAttention, CallsEqualMaskedSoftmax) {
  const auto x = random_qkv(100);
  for (const int64_t rows : {1, 70, 100}) {
    auto call = x.call(100 - rows, 100);
    const auto out = dense_attention(call.q, call.k, call.v, 0.5);
    EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
    call.q = call.q * (0.5 * std::sqrt(8.0));
    EXPECT_TRUE(close(out, attend_causally(call).out)) << rows << " rows";
  }
}

// On CUDA, few rows of one prompt see many keys in parts. A history whose parts leave some over.
TEST(DenseAttention, SinksAndSoftcapOfFewRows) {
  const auto x = random_qkv(1100, 3, 1, at::kFloat, 1);
  const auto sinks = at::arange(3, at::kFloat);
  for (const int64_t rows : {1, 13, 600}) {
    const auto call = x.call(1100 - rows, 1100);
    EXPECT_TRUE(close(dense_attention(call.q, call.k, call.v), attend_causally(call).out));
    for (const auto& [scale, softcap] : {std::pair{0.7, 2.0}, {0.0, 2.0}, {1e-30, 1e300}}) {
      const auto out = dense_attention(call.q, call.k, call.v, scale, sinks, softcap);
      EXPECT_TRUE(close(out, dense_attention(call.q.to(at::kDouble), call.k.to(at::kDouble),
                                             call.v.to(at::kDouble), scale, sinks, softcap)))
          << rows << " rows, scale " << scale;
      EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
    }
  }
}

TEST(DenseAttention, WithoutRows) {
  const auto call = random_qkv(100).call(100, 100);
  EXPECT_EQ(dense_attention(call.q, call.k, call.v).sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
}

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

TEST(SlidingWindowAttention, EqualsMaskedSoftmax) {
  const auto x = random_qkv(200);
  for (const int64_t window : {1, 40, 150, 5000}) {
    for (const int64_t count : {1, 70, 200}) {
      const auto call = x.call(200 - count, 200);
      const int64_t hidden = std::max(200 - count - window + 1, -count);
      const auto expected = attend(call, causal_mask(count, 200).triu(hidden));
      const auto [out, lse] = sliding_window_attention(call.q, call.k, call.v, window);
      EXPECT_TRUE(close(out, expected.out)) << count << " rows, window " << window;
      EXPECT_TRUE(close(lse, expected.lse)) << count << " rows, window " << window;
    }
  }
}

}  // namespace
}  // namespace h2o_prefill::testing
