#include "h2o_prefill/memory_set_tracker.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

at::Tensor row(const std::vector<float>& values) { return at::tensor(values).view({1, 1, -1}); }

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

TEST(MemorySetTracker, TruncateShortensASetThatWasBuiltAhead) {
  MemorySetTracker tracker(2, 1, 2, 0);
  tracker.init_chunk_scores(0, 0, row({5, 1, 3, 2}));
  tracker.build_memory_set(0, 4);  // for a chunk that never begins
  EXPECT_TRUE(same(tracker.indices(0), positions({0, 2, 3})));
  tracker.truncate(3);
  EXPECT_TRUE(same(tracker.indices(0), positions({0, 2, -1})));
  const auto copy = tracker.clone();
  EXPECT_TRUE(same(copy->indices(0), tracker.indices(0)));
}

TEST(MemorySetTracker, FromTensorsRefusesWhatIsNoState) {
  MemorySetTracker tracker(1, 1, 2, 0);
  tracker.init_chunk_scores(0, 0, row({5, 1, 3, 2}));
  const auto good = tracker.state_tensors();
  const auto refused = [&](size_t index, const at::Tensor& tensor, const char* message) {
    auto tensors = good;
    tensors.at(index) = tensor;
    EXPECT_VALUE_ERROR_WITH(MemorySetTracker::from_tensors(tensors), message);
  };
  refused(0, good[2], "tensors must begin with an int64 header");
  refused(2, good[3], "scores must be float32");
  refused(3, positions({0, 4, -1}), "memory must be -1 or in [0, 4)");
  refused(4, good[4].to(at::kLong), "errors must be float32");
  refused(4, good[4].flatten(), "errors must have shape [1, 1, 4], got [4]");
  refused(0, at::tensor({int64_t{1}, int64_t{2}, int64_t{0}, int64_t{2}, int64_t{3}, int64_t{4}}),
          "the most members of a memory set must be in [3, 16777216], got 2");
}

TEST(MemorySetTracker, ErrorsNameArgumentRuleAndValueAndChangeNothing) {
  EXPECT_VALUE_ERROR(MemorySetTracker(0, 1, 1, 0), "num_layers must be >= 1, got 0");
  EXPECT_VALUE_ERROR(MemorySetTracker(1, 1, 1, -1), "sink_tokens must be >= 0, got -1");

  MemorySetTracker tracker(4, 1, 2, 0);
  const auto one = row({1});
  EXPECT_VALUE_ERROR(tracker.scores(7), "layer must be in [0, 4), got 7");
  EXPECT_VALUE_ERROR(tracker.indices(2), "layer must have scores, layer 2 has none");
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
  EXPECT_VALUE_ERROR(tracker.build_memory_set(0, 2), "chunk_end must be >= 3, got 2");
  EXPECT_VALUE_ERROR(tracker.accumulate_memory_scores(0, one),
                     "colsum must have the shape of the memory set [1, 1, 3], got [1, 1, 1]");
  const auto memory = positions({0, 1, -1});
  EXPECT_VALUE_ERROR(tracker.update(0, {scores, memory, 4}),
                     "last_chunk_begin must be in [0, 3], got 4");
  EXPECT_VALUE_ERROR(tracker.update(0, {scores, memory.slice(2, 0, 2), 0}),
                     "memory must have room for K + L + H positions (3), got shape [1, 1, 2]");
  EXPECT_TRUE(same(tracker.scores(0), scores));
  EXPECT_TRUE(same(tracker.indices(0), positions({-1, -1, -1})));
  EXPECT_EQ(tracker.last_chunk_begin(0), 0);
}

}  // namespace
}  // namespace h2o_prefill::testing
