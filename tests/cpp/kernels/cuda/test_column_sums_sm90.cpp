// The column-sum kernel of sm_90a on the emulation against softmax weights in float64.
#include <gtest/gtest.h>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/column_sums_calls.h"
#include "kernels/cuda/column_sums_sm90.h"

namespace h2o_prefill::testing {

cudaError_t launch_tested(const ColumnSumsParams& params) {
  cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
  return launch_column_sums_sm90(params, nullptr);
}

int64_t partial_floats_tested(const ColumnSumsParams& params) {
  return column_sums_sm90_partial_floats(params);
}

namespace {

constexpr DType kNarrowDTypes[] = {DType::kBFloat16, DType::kFloat16};

TEST(ColumnSumsSm90, RowsAroundTheTile) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t rows : {1, 64, 127, 128, 129, 300}) {
      check_sums({.shape = {dtype, rows, rows}, .chunk_size = rows});
    }
  }
}

TEST(ColumnSumsSm90, Dims) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t dim : {8, 56, 104, 128}) {
      check_sums({.shape = {dtype, 150, 170, dim}, .chunk_size = 150});
    }
  }
}

TEST(ColumnSumsSm90, Chunks) {
  for (const int64_t chunk_size : {30, 130}) {
    check_sums({.shape = {DType::kBFloat16, 290, 290 + 45}, .chunk_size = chunk_size});
  }
}

TEST(ColumnSumsSm90, GroupsBatchesAndTransposedViews) {
  for (const int64_t group : {1, 3}) {
    for (const bool reduce_max : {false, true}) {
      const AttentionShape shape{DType::kBFloat16, 70, 70, 64, 64, 2 * group, 2, 2, group != 3};
      check_sums({.shape = shape, .chunk_size = 40, .reduce_max = reduce_max});
    }
  }
}

// More query tiles than twice the ring has buffers, an odd number and an even one.
TEST(ColumnSumsSm90, RingGoesRound) {
  for (const int64_t heads : {3, 4}) {
    check_sums({.shape = {DType::kFloat16, 300, 300, 128, 64, heads}, .chunk_size = 300});
    check_sums({.shape = {DType::kBFloat16, 300, 140, 64, 64, heads}, .width = 130, .count = 129});
  }
}

TEST(ColumnSumsSm90, RowsThatCountNothing) {
  for (const int64_t every : {1, 3}) {
    check_sums({.shape = {DType::kBFloat16, 140, 140, 64, 64, 2},
                .chunk_size = 140,
                .skipped = [=](int64_t t) { return t % every == 0; }});
  }
}

TEST(ColumnSumsSm90, MemorySets) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t width : {1, 64, 129, 200}) {
      const AttentionShape shape{dtype, 40, 220};
      check_sums({.shape = shape, .width = width, .count = width});
      check_sums({.shape = shape, .width = width, .count = width / 2, .scatter_add = true});
    }
    check_sums({.shape = {dtype, 130, 300, 128}, .width = 150, .count = 131, .scatter_add = true});
    check_sums({.shape = {dtype, 20, 50}, .width = 70, .count = 0});
    check_sums({.shape = {dtype, 20, 50}, .width = 70, .count = 0, .scatter_add = true});
  }
}

TEST(ColumnSumsSm90, GroupsOfMemorySets) {
  for (const bool reduce_max : {false, true}) {
    check_sums({.shape = {DType::kFloat16, 200, 90, 64, 64, 6, 2, 2, reduce_max},
                .width = 80,
                .count = 67,
                .scatter_add = !reduce_max,
                .reduce_max = reduce_max});
  }
}

TEST(ColumnSumsSm90, OrderOfThreadsDoesNotMatter) {
  expect_reproducible({.shape = {DType::kBFloat16, 600, 600}, .chunk_size = 600}, false);
  expect_reproducible(
      {.shape = {DType::kFloat16, 150, 250, 128, 64, 3}, .width = 140, .count = 133}, true);
}

TEST(ColumnSumsSm90, WorkspaceIsThatOfTheOtherKernelOrLess) {
  ColumnSumsParams params = SumsLaunch({.shape = {DType::kBFloat16, 1, 1}}).params();
  int64_t with_workspace = 0;
  for (const bool gathered : {false, true}) {
    params.gathered = gathered;
    for (const int64_t kv_heads : {1, 2, 8, 32}) {
      params.key.heads = kv_heads;
      params.query.heads = kv_heads * 4;
      for (const int64_t rows : {1, 64, 130, 320, 1000, 1024, 5000, 32768}) {
        params.rows.count = rows;
        params.memory.width = rows / 2;
        params.causal = {.begin = 0, .count = rows, .chunk_size = 1024};
        const int64_t floats = column_sums_sm90_partial_floats(params);
        EXPECT_LE(floats, column_sums_partial_floats(params)) << rows << " rows";
        with_workspace += floats > 0;
      }
    }
  }
  EXPECT_GT(with_workspace, 20);
}

TEST(ColumnSumsSm90, OtherInputsAreForTheOtherKernel) {
  for (const int64_t dim : {72, 96, 136, 256}) {
    const SumsLaunch wide({.shape = {DType::kBFloat16, 2, 2, dim}});
    EXPECT_FALSE(has_column_sums_sm90(wide.params()));
    EXPECT_EQ(launch_column_sums_sm90(wide.params(), nullptr), cudaErrorInvalidValue);
  }
  EXPECT_FALSE(has_column_sums_sm90(SumsLaunch({.shape = {DType::kFloat32, 2, 2}}).params()));
}

}  // namespace
}  // namespace h2o_prefill::testing
