// The column-sum kernels on the emulation against softmax weights in float64.
#include <gtest/gtest.h>

#include "kernels/cuda/column_sums_calls.h"

namespace h2o_prefill::testing {

cudaError_t launch_tested(const ColumnSumsParams& params) {
  return launch_column_sums(params, nullptr);
}

int64_t partial_floats_tested(const ColumnSumsParams& params) {
  return column_sums_partial_floats(params);
}

namespace {

TEST(ColumnSums, RowsAroundTheTile) {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129, 260}) {
      check_sums({.shape = {dtype, rows, rows}, .chunk_size = rows});
    }
  }
}

TEST(ColumnSums, Dims) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {8, 64, 80, 96, 128, 256}) {
      check_sums({.shape = {dtype, 150, 170, dim}, .chunk_size = 150});
    }
  }
}

TEST(ColumnSums, Chunks) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t chunk_size : {1, 30, 130}) {
      check_sums({.shape = {dtype, 290, 290 + 45}, .chunk_size = chunk_size});
    }
  }
}

TEST(ColumnSums, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      for (const bool reduce_max : {false, true}) {
        const AttentionShape shape{dtype, 70, 70, 64, 64, 2 * group, 2, 2, group != 3};
        check_sums({.shape = shape, .chunk_size = 40, .reduce_max = reduce_max});
      }
    }
  }
}

TEST(ColumnSums, RowsThatCountNothing) {
  for (const DType dtype : kDTypes) {
    for (const int64_t every : {1, 3}) {
      check_sums({.shape = {dtype, 140, 140, 64, 64, 2},
                  .chunk_size = 140,
                  .skipped = [=](int64_t t) { return t % every == 0; }});
    }
  }
}

TEST(ColumnSums, MemorySets) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t width : {1, 63, 64, 65, 130, 200}) {
      const AttentionShape shape{dtype, 40, 220};
      check_sums({.shape = shape, .width = width, .count = width});
      check_sums({.shape = shape, .width = width, .count = width / 2, .scatter_add = true});
    }
    check_sums({.shape = {dtype, 20, 50}, .width = 70, .count = 0});
    check_sums({.shape = {dtype, 20, 50}, .width = 70, .count = 0, .scatter_add = true});
    check_sums({.shape = {dtype, 130, 300, 128}, .width = 150, .count = 131, .scatter_add = true});
    check_sums({.shape = {dtype, 70, 300, 256}, .width = 150, .count = 131});
    check_sums({.shape = {dtype, 200, 100, 80}, .width = 50, .count = 41});
  }
}

TEST(ColumnSums, GroupsOfMemorySets) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      check_sums({.shape = {dtype, 130, 90, 64, 64, 2 * group, 2, 2, group == 3},
                  .width = 80,
                  .count = 67,
                  .scatter_add = group == 1});
    }
    for (const bool scatter_add : {false, true}) {
      check_sums({.shape = {dtype, 130, 90, 64, 64, 6, 2},
                  .width = 80,
                  .count = 67,
                  .scatter_add = scatter_add,
                  .reduce_max = true});
    }
  }
}

TEST(ColumnSums, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const bool partial : {false, true}) {
      expect_reproducible({.shape = {dtype, 150, 250, 128, 64, 3}, .width = 140, .count = 133},
                          partial);
    }
  }
}

TEST(ColumnSums, PartialSumsAreForFewKeys) {
  ColumnSumsParams params = SumsLaunch({.shape = {DType::kBFloat16, 1, 1}, .width = 1}).params();
  params.query.heads = 32;
  params.key.heads = 8;
  params.rows.count = 1024;
  params.memory.width = 512;
  // 8 KV heads and 4 key tiles, by 4 heads and 2 parts of the rows: 256 blocks.
  EXPECT_EQ(column_sums_partial_floats(params), 32 * 2 * 512);
  params.gathered = false;
  params.rows.count = 32768;
  params.causal = {.begin = 0, .count = 32768, .chunk_size = 1024};
  EXPECT_EQ(column_sums_partial_floats(params), 0);
}

TEST(ColumnSums, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kDTypes) {
    for (const bool scatter_add : {false, true}) {
      const SumsLaunch launch(
          {.shape = {dtype, 40, 90}, .width = 4, .count = 4, .scatter_add = scatter_add});
      const auto run = [&](const std::vector<int32_t>& set) {
        std::vector<float> sums(90, kBefore);
        ColumnSumsParams params = launch.params();
        params.memory.positions = set.data();
        params.sums = sums.data();
        EXPECT_EQ(launch_tested(params), cudaSuccess);
        return sums;
      };
      EXPECT_EQ(run({3, 40, 90, 2147483647}), run({3, 40, -1, -1}));
    }
  }
}

TEST(ColumnSums, NothingToDo) {
  SumsLaunch launch({.shape = {DType::kBFloat16, 5, 5}});
  ColumnSumsParams params = launch.params();
  std::vector<float> sums(5, kBefore);
  params.gathered = true;
  params.sums = sums.data();
  ASSERT_EQ(launch_tested(params), cudaSuccess);
  EXPECT_EQ(sums, std::vector<float>(5, kBefore));
}

}  // namespace
}  // namespace h2o_prefill::testing
