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
  const auto config = small_config();
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
                     "max_capacity must be >= 80, the tokens after this append, got 70");
  EXPECT_VALUE_ERROR(prompt.forward(x, 7), "layer must be in [0, 2), got 7");
  EXPECT_VALUE_ERROR(prompt.forward({x.q[0], x.k, x.v}),
                     "query must have 4 dimensions, got shape [4, 40, 8]");
  EXPECT_VALUE_ERROR(prompt.forward({x.q.slice(1, 0, 3), x.k, x.v}),
                     "the query heads must be a multiple of the KV heads, got 3 and 2");
  EXPECT_VALUE_ERROR_WITH(prompt.forward({x.q.clone().requires_grad_(), x.k, x.v}),
                          "query must not require a gradient");
  EXPECT_VALUE_ERROR_WITH(prompt.forward(random_qkv(20, 4, 2, at::kDouble)),
                          "key must be like the earlier ones");
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
