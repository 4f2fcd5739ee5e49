#include "h2o_prefill/chunked_kv_cache.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(ChunkedKVCache, GrowsByDoublingUpToTheLimit) {
  const auto x = random_qkv(100);
  ChunkedKVCache cache(1, 8, 50);
  EXPECT_EQ(cache.capacity(0), 0);
  const auto append = [&](int64_t begin, int64_t end) {
    const auto added = x.tokens(begin, end);
    cache.append(0, added.k, added.v);
  };
  append(0, 3);
  EXPECT_EQ(cache.capacity(0), 8);
  append(3, 8);
  EXPECT_EQ(cache.capacity(0), 8);
  append(8, 9);
  EXPECT_EQ(cache.capacity(0), 16);
  append(9, 33);  // more than twice as much
  EXPECT_EQ(cache.capacity(0), 33);
  append(33, 34);  // twice as much would pass the limit
  EXPECT_EQ(cache.capacity(0), 50);
  append(34, 50);
  EXPECT_TRUE(same(cache.key(0), x.k.slice(2, 0, 50)));
}

TEST(ChunkedKVCache, UnlikeEarlierAppendsThrowsAndChangesNothing) {
  const auto x = random_qkv(4, 4, 2);
  ChunkedKVCache cache(2, 8, 16);
  cache.append(0, x.k, x.v);
  EXPECT_VALUE_ERROR(
      cache.append(0, x.k.slice(3, 0, 4), x.v),
      "key must be like the earlier ones, [2, 2, *, 8] float32 on cpu, got [2, 2, 4, 4] "
      "float32 on cpu");
  EXPECT_VALUE_ERROR_WITH(cache.append(0, x.k, x.v.slice(3, 0, 4)),
                          "value must be like the earlier ones");
  EXPECT_VALUE_ERROR_WITH(cache.append(0, x.k.to(at::kDouble), x.v.to(at::kDouble)),
                          "got [2, 2, 4, 8] float64 on cpu");
  EXPECT_EQ(cache.length(0), 4);
  EXPECT_TRUE(same(cache.key(0), x.k));
  EXPECT_TRUE(same(cache.value(0), x.v));
  cache.append(1, x.k.to(at::kHalf), x.v.to(at::kHalf));  // layers are independent
}

TEST(ChunkedKVCache, KeyAndValueMustAgree) {
  const auto x = random_qkv(4);
  ChunkedKVCache cache(1, 8, 16);
  EXPECT_VALUE_ERROR(
      cache.append(0, x.k, x.v.slice(2, 0, 3)),
      "value must have batch, heads and length of key [2, 2, 4, 8], got shape [2, 2, 3, 16]");
  EXPECT_VALUE_ERROR_WITH(cache.append(0, x.k, x.v.to(at::kDouble)),
                          "value must have dtype and device of key");
  EXPECT_VALUE_ERROR(cache.append(0, x.k[0], x.v),
                     "key must have 4 dimensions, got shape [2, 4, 8]");
  EXPECT_VALUE_ERROR(cache.append(0, at::Tensor(), x.v),
                     "key must be a tensor with 4 dimensions, got none");
  EXPECT_EQ(cache.capacity(0), 0);
}

TEST(ChunkedKVCache, RefusesGradients) {
  const auto x = random_qkv(4);
  const auto key = x.k.clone().requires_grad_();
  ChunkedKVCache cache(1, 8, 16);
  EXPECT_VALUE_ERROR_WITH(cache.append(0, key, x.v), "key must not require a gradient");
  EXPECT_EQ(cache.length(0), 0);
  const at::NoGradGuard no_grad;
  const auto [held, value] = cache.append(0, key, x.v);
  EXPECT_FALSE(held.requires_grad());
}

TEST(ChunkedKVCache, ResetKeepsTheBuffersForAPromptThatIsAlike) {
  const auto x = random_qkv(8), other = random_qkv(7, 4, 2, at::kBFloat16, 1);
  ChunkedKVCache cache(1, 8, 64);
  cache.append(0, x.k, x.v);
  const auto* buffer = cache.key(0).const_data_ptr();
  cache.reset();
  EXPECT_EQ(cache.capacity(0), 8);
  EXPECT_VALUE_ERROR(cache.key(0), "layer must hold tokens, layer 0 has none");
  cache.append(0, x.k, x.v);
  EXPECT_EQ(cache.key(0).const_data_ptr(), buffer);
  EXPECT_TRUE(same(cache.key(0), x.k));
  cache.reset();
  cache.append(0, other.k, other.v);  // another batch size and dtype
  EXPECT_TRUE(same(cache.key(0), other.k));
  EXPECT_TRUE(same(cache.value(0), other.v));
}

TEST(ChunkedKVCache, FromTensorsRefusesWhatIsNoState) {
  const auto x = random_qkv(4);
  ChunkedKVCache cache(1, 8, 16);
  cache.append(0, x.k, x.v);
  const auto good = cache.state_tensors();
  EXPECT_VALUE_ERROR_WITH(ChunkedKVCache::from_tensors({x.k}),
                          "tensors must begin with an int64 header");
  EXPECT_VALUE_ERROR_WITH(ChunkedKVCache::from_tensors({good[0]}), "tensors must hold all layers");
  auto tensors = good;
  tensors[2] = x.k.slice(2, 0, 2);
  tensors[3] = x.v.slice(2, 0, 2);
  EXPECT_VALUE_ERROR_WITH(ChunkedKVCache::from_tensors(tensors), "key must have the length (4)");
  tensors = good;
  tensors[1] = good[1].clone();
  tensors[1][0] = 17;
  EXPECT_VALUE_ERROR_WITH(ChunkedKVCache::from_tensors(tensors), "key must have the length (17)");
}

TEST(ChunkedKVCache, ErrorsNameArgumentRuleAndValue) {
  EXPECT_VALUE_ERROR(ChunkedKVCache(0, 8, 16), "num_layers must be >= 1, got 0");
  EXPECT_VALUE_ERROR(ChunkedKVCache(1, 32, 16),
                     "max_capacity must be >= initial_capacity (32), got 16");
  const auto x = random_qkv(4);
  ChunkedKVCache cache(4, 8, 16);
  EXPECT_VALUE_ERROR(cache.append(7, x.k, x.v), "layer must be in [0, 4), got 7");
  EXPECT_VALUE_ERROR(cache.truncate(-1), "length must be >= 0, got -1");
}

}  // namespace
}  // namespace h2o_prefill::testing
