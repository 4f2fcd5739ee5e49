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

}  // namespace
}  // namespace h2o_prefill::testing
