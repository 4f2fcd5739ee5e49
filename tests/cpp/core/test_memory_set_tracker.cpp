#include "h2o_prefill/memory_set_tracker.h"

#include "h2o_prefill/chunk_manager.h"
#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kChunk = 16;
constexpr int64_t kLocal = 3;
constexpr int64_t kHeavy = 4;
constexpr int64_t kSinks = 1;

PrefillConfig tracker_config() {
  return {
      .chunk_size = kChunk, .local_window = kLocal, .heavy_budget = kHeavy, .sink_tokens = kSinks};
}

MemorySetTracker make_tracker(int64_t layers = 2) { return {layers, kLocal, kHeavy, kSinks}; }

at::Tensor row(const std::vector<float>& values) { return at::tensor(values).view({1, 1, -1}); }

// Prefills with the ops of single chunks, and gives the tracker the column sums.
void prefill_by_chunks(MemorySetTracker& tracker, int64_t layer, const Qkv& x, int64_t begin,
                       int64_t end) {
  const ChunkManager chunks(begin, end - begin, kChunk);
  for (int64_t c = 0; c < chunks.num_chunks(); ++c) {
    const auto chunk = x.tokens(chunks.begin(c), chunks.end(c));
    const auto colsum = std::get<2>(intra_chunk_attention(chunk.q, chunk.k, chunk.v, kChunk));
    if (chunks.begin(c) == 0) {
      tracker.init_chunk_scores(layer, 0, colsum);
      continue;
    }
    const auto memory = tracker.build_memory_set(layer, chunks.begin(c));
    tracker.init_chunk_scores(layer, chunks.begin(c), colsum);
    tracker.accumulate_memory_scores(layer,
                                     std::get<2>(memory_attention(chunk.q, x.k, x.v, memory)));
  }
}

TEST(MemorySetTracker, ByChunksEqualsTheOpAcrossCallsAndForeignTokens) {
  // A call, ten tokens from elsewhere, another call.
  const auto x = random_qkv(84);
  auto tracker = make_tracker();
  prefill_by_chunks(tracker, 0, x, 0, 40);
  prefill_by_chunks(tracker, 0, x, 50, 84);

  const auto first = x.call(0, 40), second = x.call(50, 84);
  const auto [out, state] =
      chunked_sparse_attention(first.q, first.k, first.v, {}, tracker_config());
  const auto [out2, state2] =
      chunked_sparse_attention(second.q, second.k, second.v, state, tracker_config());
  EXPECT_EQ(state.last_chunk_begin, 32);
  EXPECT_TRUE(close(tracker.scores(0), state2.scores));
  EXPECT_TRUE(same(tracker.indices(0), state2.memory));
}

TEST(MemorySetTracker, WorkedExample) {
  MemorySetTracker tracker(1, /*local_window=*/1, /*heavy_budget=*/2, /*sink_tokens=*/0);
  tracker.init_chunk_scores(0, 0, row({5, 1, 3, 2}));
  EXPECT_TRUE(same(tracker.indices(0), positions({-1, -1, -1})));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(same(tracker.build_memory_set(0, 4), positions({0, 2, 3})));
  }
  tracker.init_chunk_scores(0, 4, row({4, 1, 1, 6}));
  tracker.accumulate_memory_scores(0, row({1, 2, 3}));
  EXPECT_TRUE(same(tracker.scores(0), row({6, 1, 5, 5, 4, 1, 1, 6})));
  // Candidates are {0, 2, 3} and [4, 8): position 1 left and does not return. Of 2 and 3 the lower
  // wins.
  EXPECT_TRUE(same(tracker.build_memory_set(0, 8), positions({0, 2, 7})));
}

TEST(MemorySetTracker, NeverWritesToTensorsItWasGiven) {
  MemorySetTracker tracker(1, 1, 1, 0);
  const auto colsum = row({1, 2});
  tracker.init_chunk_scores(0, 0, colsum);
  tracker.build_memory_set(0, 2);
  tracker.accumulate_memory_scores(0, row({5, 5}));
  EXPECT_TRUE(same(colsum, row({1, 2})));
  const auto scores = row({1, 2, 3});
  const auto memory = positions({0, 1});
  tracker.update(0, {scores, memory, 2});
  tracker.accumulate_memory_scores(0, row({5, 5}));
  tracker.truncate(1);
  EXPECT_TRUE(same(scores, row({1, 2, 3})));
  EXPECT_TRUE(same(memory, positions({0, 1})));
}

TEST(MemorySetTracker, ScoresAreUpdatedInPlace) {
  MemorySetTracker tracker(1, 1, 1, 0);
  tracker.init_chunk_scores(0, 0, row({1, 2}));
  tracker.build_memory_set(0, 2);
  const auto scores = tracker.scores(0);
  tracker.accumulate_memory_scores(0, row({5, 6}));
  EXPECT_TRUE(same(scores, row({6, 8}))) << "what scores() returned shows it";
  const void* const buffer = scores.const_data_ptr();
  tracker.init_chunk_scores(0, 2, row({3}));
  EXPECT_NE(tracker.scores(0).const_data_ptr(), buffer) << "the buffer has grown";
  const void* const grown = tracker.scores(0).const_data_ptr();
  tracker.init_chunk_scores(0, 3, row({4}));
  EXPECT_EQ(tracker.scores(0).const_data_ptr(), grown) << "by doubling";
  EXPECT_TRUE(same(tracker.scores(0), row({6, 8, 3, 4})));
}

TEST(MemorySetTracker, TruncateShortensASetThatWasBuiltAhead) {
  MemorySetTracker tracker(2, 1, 2, 0);
  tracker.init_chunk_scores(0, 0, row({5, 1, 3, 2}));
  tracker.build_memory_set(0, 4);  // for a chunk that never begins
  EXPECT_TRUE(same(tracker.indices(0), positions({0, 2, 3})));
  tracker.truncate(3);
  EXPECT_TRUE(same(tracker.indices(0), positions({0, 2, -1})));
  const auto copy = MemorySetTracker::from_tensors(tracker.state_tensors());
  EXPECT_TRUE(same(copy->indices(0), tracker.indices(0)));
}

TEST(MemorySetTracker, TruncateRemovesTokens) {
  MemorySetTracker tracker(2, 1, 2, 0);
  const auto fill = [&] {
    tracker.reset();
    tracker.init_chunk_scores(0, 0, row({5, 1, 3, 2}));
    tracker.build_memory_set(0, 4);
    tracker.init_chunk_scores(0, 4, row({4, 1, 1, 6}));
  };
  fill();
  tracker.truncate(9);
  EXPECT_EQ(tracker.length(0), 8);
  // Inside the last chunk the set is still the one that it attended to.
  tracker.truncate(5);
  EXPECT_TRUE(same(tracker.scores(0), row({5, 1, 3, 2, 4})));
  EXPECT_TRUE(same(tracker.indices(0), positions({0, 2, 3})));
  EXPECT_EQ(tracker.last_chunk_begin(0), 4);
  // Tokens that come densely instead have score 0.
  EXPECT_TRUE(same(tracker.build_memory_set(0, 7), positions({0, 4, 6})));
  EXPECT_TRUE(same(tracker.scores(0), row({5, 1, 3, 2, 4, 0, 0})));
  // Before it every token is a candidate again.
  fill();
  tracker.truncate(4);
  EXPECT_TRUE(same(tracker.indices(0), positions({-1, -1, -1})));
  EXPECT_EQ(tracker.last_chunk_begin(0), 0);
  EXPECT_TRUE(same(tracker.build_memory_set(0, 4), positions({0, 2, 3})));
  tracker.truncate(0);
  EXPECT_FALSE(tracker.has_scores(0));
  EXPECT_VALUE_ERROR(tracker.truncate(-1), "length must be >= 0, got -1");
}

TEST(MemorySetTracker, WideLayersHaveLargerSets) {
  auto config = tracker_config();
  config.wide = {{1, 3}, {1, 0, 6}};
  MemorySetTracker tracker(2, config);
  EXPECT_EQ(tracker.memory_size(0), kLocal + kHeavy + kSinks);
  EXPECT_EQ(tracker.memory_size(1), 2 * 3 * (kLocal + kHeavy) + kSinks);
  prefill_by_chunks(tracker, 1, random_qkv(70), 0, 70);
  EXPECT_EQ(tracker.indices(1).ge(0).sum(-1).max().item<int64_t>(), 3 * (kLocal + kHeavy) + kSinks);
  const auto restored = MemorySetTracker::from_tensors(tracker.state_tensors());
  EXPECT_EQ(restored->local_window(1), 3 * kLocal);
  EXPECT_TRUE(same(restored->indices(1), tracker.indices(1)));
}

TEST(MemorySetTracker, StateRoundTrips) {
  const auto x = random_qkv(40);
  auto tracker = make_tracker(3);
  prefill_by_chunks(tracker, 1, x, 0, 40);
  auto state = tracker.state(1);
  EXPECT_TRUE(same(state.errors, at::zeros({2, 2, kErrorFields})));
  state.errors.fill_(2);
  tracker.update(1, state);
  const auto restored = MemorySetTracker::from_tensors(tracker.state_tensors());
  EXPECT_TRUE(same(restored->errors(1), state.errors));
  EXPECT_EQ(restored->num_layers(), 3);
  EXPECT_EQ(restored->local_window(), kLocal);
  EXPECT_EQ(restored->heavy_budget(), kHeavy);
  EXPECT_EQ(restored->sink_tokens(), kSinks);
  EXPECT_FALSE(restored->has_scores(0));
  EXPECT_TRUE(same(restored->scores(1), tracker.scores(1)));
  EXPECT_TRUE(same(restored->indices(1), tracker.indices(1)));
  EXPECT_EQ(restored->last_chunk_begin(1), 32);
  restored->scores(1).fill_(0);
  EXPECT_GT(tracker.scores(1).sum().item<float>(), 0) << "the two must not share memory";
}

TEST(MemorySetTracker, FromTensorsRefusesWhatIsNoState) {
  auto tracker = make_tracker(1);
  prefill_by_chunks(tracker, 0, random_qkv(20), 0, 20);
  const auto good = tracker.state_tensors();
  EXPECT_VALUE_ERROR_WITH(MemorySetTracker::from_tensors({}),
                          "tensors must begin with an int64 header");
  EXPECT_VALUE_ERROR_WITH(MemorySetTracker::from_tensors({good[0]}),
                          "tensors must hold scores, memory and errors of layer 0");
  const auto wrong = [&](size_t index, const at::Tensor& tensor) {
    auto tensors = good;
    tensors.at(index) = tensor;
    return MemorySetTracker::from_tensors(tensors);
  };
  EXPECT_VALUE_ERROR_WITH(
      MemorySetTracker::from_tensors({good[0], good[1], good[2], good[3], good[3]}),
      "tensors must end");
  EXPECT_VALUE_ERROR_WITH(wrong(1, good[2]), "scores must be float32");
  EXPECT_VALUE_ERROR_WITH(wrong(3, good[3].to(at::kLong)), "errors must be float32");
  EXPECT_VALUE_ERROR_WITH(wrong(3, good[3].flatten()),
                          "errors must have shape [2, 2, 4], got [16]");
  EXPECT_VALUE_ERROR_WITH(wrong(3, good[3].narrow(1, 0, 1)),
                          "errors must have shape [2, 2, 4], got [2, 1, 4]");
  EXPECT_VALUE_ERROR(
      wrong(0, at::tensor({kSinks, kLocal, kHeavy, int64_t{7}, int64_t{0}, int64_t{0}})),
      "the most members of a memory set must be in [8, 16777216], got 7");
}

TEST(MemorySetTracker, ErrorsNameArgumentRuleAndValueAndChangeNothing) {
  EXPECT_VALUE_ERROR(MemorySetTracker(0, 1, 1, 0), "num_layers must be >= 1, got 0");
  EXPECT_VALUE_ERROR(MemorySetTracker(1, -3, 1, 0), "local_window must be >= 0, got -3");
  EXPECT_VALUE_ERROR(MemorySetTracker(1, 1, -1, 0), "heavy_budget must be >= 0, got -1");
  EXPECT_VALUE_ERROR(MemorySetTracker(1, 1, 1, -1), "sink_tokens must be >= 0, got -1");

  MemorySetTracker tracker(4, 1, 2, 0);
  const auto one = row({1});
  EXPECT_VALUE_ERROR(tracker.scores(7), "layer must be in [0, 4), got 7");
  EXPECT_VALUE_ERROR(tracker.indices(2), "layer must have scores, layer 2 has none");
  EXPECT_VALUE_ERROR(tracker.build_memory_set(2, 4), "layer must have scores, layer 2 has none");
  EXPECT_VALUE_ERROR(tracker.accumulate_memory_scores(2, one),
                     "layer must have scores, layer 2 has none");
  EXPECT_VALUE_ERROR(tracker.init_chunk_scores(0, -1, one), "chunk_begin must be >= 0, got -1");
  EXPECT_VALUE_ERROR(tracker.init_chunk_scores(0, 0, one[0]),
                     "colsum must have 3 dimensions, got shape [1, 1]");
  EXPECT_VALUE_ERROR(tracker.init_chunk_scores(0, 0, one.to(at::kHalf)),
                     "colsum must be float32 or float64, got float16");
  EXPECT_FALSE(tracker.has_scores(0));

  const auto scores = row({1, 2, 3});
  tracker.init_chunk_scores(0, 0, scores);
  EXPECT_VALUE_ERROR(tracker.init_chunk_scores(0, 2, one), "chunk_begin must be >= 3, got 2");
  EXPECT_VALUE_ERROR_WITH(tracker.init_chunk_scores(0, 3, one.expand({1, 2, 1})),
                          "colsum must have batch and heads of scores");
  EXPECT_VALUE_ERROR_WITH(tracker.init_chunk_scores(0, 3, one.to(at::kDouble)),
                          "colsum must have dtype and device");
  EXPECT_VALUE_ERROR(tracker.build_memory_set(0, 2), "chunk_end must be >= 3, got 2");
  EXPECT_VALUE_ERROR(tracker.accumulate_memory_scores(0, one),
                     "colsum must have the shape of the memory set [1, 1, 3], got [1, 1, 1]");
  const auto memory = positions({0, 1, -1});
  EXPECT_VALUE_ERROR(tracker.update(0, {scores, memory, 4}),
                     "last_chunk_begin must be in [0, 3], got 4");
  EXPECT_VALUE_ERROR(tracker.update(0, {scores, memory.slice(2, 0, 2), 0}),
                     "memory must have room for K + L + H positions (3), got shape [1, 1, 2]");
  EXPECT_VALUE_ERROR_WITH(tracker.update(0, {scores, memory.to(at::kLong), 0}),
                          "memory must be int32");
  EXPECT_VALUE_ERROR_WITH(tracker.update(0, {scores.expand({2, 1, 3}), memory, 0}),
                          "memory must have batch and heads");
  EXPECT_VALUE_ERROR(tracker.update(9, {scores, memory, 0}), "layer must be in [0, 4), got 9");
  EXPECT_TRUE(same(tracker.scores(0), scores));
  EXPECT_TRUE(same(tracker.indices(0), positions({-1, -1, -1})));
  EXPECT_EQ(tracker.last_chunk_begin(0), 0);
}

}  // namespace
}  // namespace h2o_prefill::testing
