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

}  // namespace
}  // namespace h2o_prefill::testing
