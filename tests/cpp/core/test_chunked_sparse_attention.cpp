#include "h2o_prefill/chunked_sparse_attention.h"

#include <c10/core/InferenceMode.h>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kLayers = 2;

PrefillConfig small_config() {
  return {.chunk_size = 16, .local_window = 3, .heavy_budget = 4, .sink_tokens = 1};
}

// One prompt under way.
struct Prompt {
  explicit Prompt(const PrefillConfig& settings = small_config(), int64_t max_capacity = 4096)
      : config(settings),
        attention(settings),
        cache(c10::make_intrusive<ChunkedKVCache>(kLayers, 8, max_capacity)),
        tracker(c10::make_intrusive<MemorySetTracker>(kLayers, settings)) {}

  at::Tensor forward(const Qkv& tokens, int64_t layer = 0, const RecallLists& recall = {},
                     std::optional<double> scale = std::nullopt) {
    return attention.forward(layer, tokens.q, tokens.k, tokens.v, cache, tracker, scale, recall);
  }

  PrefillConfig config;
  ChunkedSparseAttention attention;
  c10::intrusive_ptr<ChunkedKVCache> cache;
  c10::intrusive_ptr<MemorySetTracker> tracker;
};

TEST(ChunkedSparseAttention, LongCallIsTheOpOfTheLayer) {
  auto config = small_config();
  config.dense_tail = 5;
  config.gqa_reduce = "max";
  config.dense_layers = {1};
  const auto x = random_qkv(70);
  Prompt prompt(config);
  const auto [out, state] = chunked_sparse_attention(x.q, x.k, x.v, {}, config, {}, 0.7);
  EXPECT_TRUE(same(prompt.forward(x, 0, {}, 0.7), out));
  EXPECT_TRUE(same(prompt.tracker->scores(0), state.scores));
  EXPECT_TRUE(same(prompt.tracker->indices(0), state.memory));
  EXPECT_EQ(prompt.tracker->last_chunk_begin(0), 64);
  EXPECT_TRUE(same(prompt.cache->key(0), x.k));
  EXPECT_TRUE(same(prompt.cache->value(0), x.v));
  EXPECT_EQ(prompt.cache->length(1), 0);
  EXPECT_TRUE(same(prompt.forward(x, 1, {}, 0.7), dense_attention(x.q, x.k, x.v, 0.7)));
  EXPECT_FALSE(prompt.tracker->has_scores(1));
}

TEST(ChunkedSparseAttention, DecodeIsDenseAndLeavesTheTrackerAlone) {
  const auto x = random_qkv(43);
  Prompt prompt;
  prompt.forward(x.tokens(0, 40));
  const auto state = prompt.tracker->state_tensors();
  for (int64_t i = 40; i < 43; ++i) {
    EXPECT_TRUE(close(prompt.forward(x.tokens(i, i + 1)), attend_causally(x.call(i, i + 1)).out));
  }
  const auto after = prompt.tracker->state_tensors();
  ASSERT_EQ(after.size(), state.size());
  for (size_t i = 0; i < state.size(); ++i) EXPECT_TRUE(same(after[i], state[i]));
  EXPECT_TRUE(same(prompt.cache->key(0), x.k));
}

TEST(ChunkedSparseAttention, ShortCallIsDenseAndCausal) {
  const auto x = random_qkv(55);
  Prompt prompt;
  EXPECT_TRUE(close(prompt.forward(x.tokens(0, 15)), attend_causally(x.call(0, 15)).out));
  EXPECT_FALSE(prompt.tracker->has_scores(0));
  prompt.forward(x.tokens(15, 45));
  EXPECT_TRUE(prompt.tracker->has_scores(0));
  EXPECT_TRUE(close(prompt.forward(x.tokens(45, 55)), attend_causally(x.call(45, 55)).out));
  EXPECT_EQ(prompt.tracker->scores(0).size(2), 45);
}

TEST(ChunkedSparseAttention, CallWithoutTokensChangesNothing) {
  const auto x = random_qkv(40);
  Prompt prompt;
  EXPECT_EQ(prompt.forward(x.tokens(0, 0)).sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
  prompt.forward(x);
  EXPECT_EQ(prompt.forward(x.tokens(0, 0)).sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
  EXPECT_EQ(prompt.cache->length(0), 40);
}

// The state that a failed call must leave as it was.
class Snapshot {
 public:
  explicit Snapshot(const Prompt& prompt)
      : cache_(prompt.cache->state_tensors()), tracker_(prompt.tracker->state_tensors()) {
    for (int64_t layer = 0; layer < kLayers; ++layer)
      lengths_.push_back(prompt.cache->length(layer));
  }

  void expect_unchanged(const Prompt& prompt) const {
    const Snapshot now(prompt);
    EXPECT_EQ(now.lengths_, lengths_);
    ASSERT_EQ(now.tracker_.size(), tracker_.size());
    for (size_t i = 0; i < tracker_.size(); ++i) EXPECT_TRUE(same(now.tracker_[i], tracker_[i]));
    if (now.cache_.size() != cache_.size()) return;  // buffers may have come into being
    for (size_t i = 1; i < cache_.size(); ++i) EXPECT_TRUE(same(now.cache_[i], cache_[i]));
  }

 private:
  std::vector<int64_t> lengths_;
  std::vector<at::Tensor> cache_;
  std::vector<at::Tensor> tracker_;
};

TEST(ChunkedSparseAttention, OpThatThrowsLeavesCacheAndTrackerAsTheyWere) {
  const auto x = random_qkv(80);
  const auto bad_offsets = at::zeros({3}, at::kInt), none = at::zeros({0}, at::kInt);
  const RecallLists bad_lists{bad_offsets, none, none};
  auto config = small_config();
  config.recall_block = 8;
  for (const int64_t begin : {0, 40}) {
    Prompt prompt(config), untouched(config);
    if (begin > 0) {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        prompt.forward(x.tokens(0, begin), layer);
        untouched.forward(x.tokens(0, begin), layer);
      }
    }
    const Snapshot before(prompt);
    EXPECT_VALUE_ERROR_WITH(prompt.forward(x.tokens(begin, 80), 1, bad_lists),
                            "recall_offsets must have");
    before.expect_unchanged(prompt);
    EXPECT_TRUE(
        same(prompt.forward(x.tokens(begin, 80), 1), untouched.forward(x.tokens(begin, 80), 1)));
  }
  // A first call that throws does not fix the shape.
  Prompt prompt(config);
  EXPECT_VALUE_ERROR_WITH(prompt.forward(x, 0, bad_lists), "recall_offsets must have");
  EXPECT_NO_THROW(prompt.forward(random_qkv(40, 3, 3, at::kHalf, 1)));
  EXPECT_EQ(prompt.cache->key(0).scalar_type(), at::kHalf);
}

TEST(ChunkedSparseAttention, WrongArgumentsAreNamedAndChangeNothing) {
  const auto x = random_qkv(40);
  Prompt prompt(small_config(), /*max_capacity=*/70);
  prompt.forward(x);
  const Snapshot before(prompt);
  EXPECT_VALUE_ERROR(prompt.forward(x),
                     "max_capacity must be >= 80, the tokens of layer 0 after this append, got 70");
  EXPECT_VALUE_ERROR(ChunkedSparseAttention({.chunk_size = 0}), "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR(prompt.forward(x, 7), "layer must be in [0, 2), got 7");
  EXPECT_VALUE_ERROR(prompt.forward({x.q[0], x.k, x.v}),
                     "query must have 4 dimensions, got shape [4, 40, 8]");
  EXPECT_VALUE_ERROR(
      prompt.forward({x.q.slice(2, 0, 9), x.k, x.v}),
      "query must have batch, length and head dim of key [2, 2, 40, 8], got shape [2, 4, 9, 8]");
  EXPECT_VALUE_ERROR(prompt.forward({x.q.slice(1, 0, 3), x.k, x.v}),
                     "the query heads must be a multiple of the KV heads, got 3 and 2");
  EXPECT_VALUE_ERROR(prompt.forward({x.q.to(at::kLong), x.k.to(at::kLong), x.v.to(at::kLong)}),
                     "query must be float32, bfloat16, float16 or float64, got int64");
  EXPECT_VALUE_ERROR_WITH(prompt.forward({x.q, x.k.to(at::kDouble), x.v}),
                          "key must have dtype and device of query");
  EXPECT_VALUE_ERROR_WITH(prompt.forward({x.q, x.k, x.v.to(at::kDouble)}),
                          "value must have dtype and device of key");
  EXPECT_VALUE_ERROR_WITH(prompt.forward({x.q.clone().requires_grad_(), x.k, x.v}),
                          "query must not require a gradient");
  EXPECT_VALUE_ERROR_WITH(prompt.forward(random_qkv(20, 4, 2, at::kDouble)),
                          "key must be like what layer 0 holds");
  before.expect_unchanged(prompt);
}

TEST(ChunkedSparseAttention, CacheAndTrackerMustBelongTogether) {
  const auto x = random_qkv(40);
  Prompt prompt, other;
  EXPECT_VALUE_ERROR(prompt.attention.forward(0, x.q, x.k, x.v, prompt.cache, {}),
                     "cache and tracker must be given, got none");
  EXPECT_VALUE_ERROR(prompt.attention.forward(0, x.q, x.k, x.v, prompt.cache,
                                              c10::make_intrusive<MemorySetTracker>(3, 3, 4, 1)),
                     "tracker must have the layers of cache (2), got 3");
  EXPECT_VALUE_ERROR(prompt.attention.forward(0, x.q, x.k, x.v, prompt.cache,
                                              c10::make_intrusive<MemorySetTracker>(2, 3, 5, 1)),
                     "tracker must have local_window, heavy_budget and sink_tokens of the config "
                     "(3, 4, 1) in layer 0, got (3, 5, 1)");
  other.forward(x);
  EXPECT_VALUE_ERROR(prompt.attention.forward(0, x.q, x.k, x.v, prompt.cache, other.tracker),
                     "tracker must belong to the prompt of cache, which holds 0 tokens of layer 0, "
                     "got scores of 40");
  EXPECT_EQ(prompt.cache->length(0), 0);
}

}  // namespace
}  // namespace h2o_prefill::testing
