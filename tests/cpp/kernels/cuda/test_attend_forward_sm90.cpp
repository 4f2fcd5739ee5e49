// The forward kernel of sm_90a on the emulation, which has so few multiprocessors that a block
// takes several tiles of rows, against attention in float64.
#include <gtest/gtest.h>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/attend_calls.h"
#include "kernels/cuda/attend_forward_sm90.h"

namespace h2o_prefill::testing {

cudaError_t launch_tested(const AttendForwardParams& params) {
  cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
  return launch_attend_forward_sm90(params, nullptr);
}

namespace {

constexpr DType kNarrowDTypes[] = {DType::kBFloat16, DType::kFloat16};

TEST(AttendForwardSm90, RowsAroundTheTile) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t rows : {1, 64, 127, 128, 129}) {
      check_causal({dtype, rows, rows, 64, 64}, rows);
      check_causal({dtype, rows, rows + 37, 64, 64}, 0);
    }
  }
}

TEST(AttendForwardSm90, Dims) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t dim : {8, 56, 104, 128}) {
      check_causal({dtype, 70, 70, dim, dim}, 70);
    }
    check_causal({dtype, 70, 140, 64, 128}, 0);
    check_causal({dtype, 140, 140, 128, 40}, 140);
  }
}

TEST(AttendForwardSm90, Chunks) {
  for (const int64_t chunk_size : {1, 30, 130}) {
    check_causal({DType::kBFloat16, 150, 150 + 45, 64, 64}, chunk_size);
  }
}

TEST(AttendForwardSm90, GroupsBatchesAndTransposedViews) {
  for (const int64_t group : {1, 3}) {
    check_causal({DType::kBFloat16, 66, 66, 64, 64, 2 * group, 2, 2}, 40);
    check_causal({DType::kFloat16, 66, 80, 64, 56, 2 * group, 2, 2, /*transposed=*/true}, 0);
  }
}

// More tiles of keys than twice the rings have buffers, an odd number and an even one.
TEST(AttendForwardSm90, RingsGoRound) {
  check_causal({DType::kBFloat16, 130, 620, 128, 128, 3}, 0);
  check_causal({DType::kFloat16, 10, 700, 64, 64, 5}, 0);
}

TEST(AttendForwardSm90, RowRangeWithoutLse) {
  Call call({DType::kBFloat16, 100, 120}, 20);
  call.params.out = call.out.view();
  call.params.rows = {.begin = 60, .count = 30, .past = 20};
  ASSERT_EQ(launch_tested(call.params), cudaSuccess);
  const Expected expected = attend(call.in, causal_keys(20, 0));
  const double tolerance = out_tolerance(DType::kBFloat16, expected);
  const std::vector<double> out = call.out.numbers();
  for (size_t i = 0; i < out.size(); ++i) {
    if (i / 64 < 60 || i / 64 >= 90) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_NEAR(out[i], expected.out[i], tolerance) << i;
    }
  }
}

TEST(AttendForwardSm90, MemorySets) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t width : {1, 128, 129, 300}) {
      check_gathered({dtype, 40, 420}, width, width);
      check_gathered({dtype, 40, 420}, width, width / 2);
    }
    check_gathered({dtype, 20, 50}, 0, 0);
    check_gathered({dtype, 20, 50}, 70, 0);
    check_gathered({dtype, 130, 300, 128, 128}, 150, 131);
  }
  check_gathered({DType::kBFloat16, 33, 90, 64, 64, 6, 2, 2, true}, 80, 67);
}

TEST(AttendForwardSm90, RecalledKeys) {
  check_recall({{DType::kBFloat16, 200, 300, 64, 64}, 64, 64, 100, 70, 50});
  check_recall({{DType::kFloat16, 150, 250, 64, 56, 4, 2, 2, true}, 60, 20, 30, 40, 40});
  check_recall({{DType::kBFloat16, 150, 250, 128, 128, 3, 1}, 150, 1, 3, 140, 133});
  check_recall({{DType::kFloat16, 150, 220, 128, 64}, 150, 150, 200, 70, 0});
  check_recall({{DType::kBFloat16, 140, 300, 64, 64}, 140, 35, 150, 0, 0});
}

TEST(AttendForwardSm90, OrderOfThreadsDoesNotMatter) {
  const RecallCase x{{DType::kBFloat16, 150, 300, 128, 104, 4, 1}, 150, 50, 80, 140, 133};
  const std::vector<int32_t> sets = memory_sets(1, x.width, x.count, 150);
  const Recall recall(1, 150, 150, x.block, x.most);
  expect_reproducible([&] { return run_chunks(x, sets, recall); });
}

TEST(AttendForwardSm90, PositionsOutsideOfTheHistoryAreAbsent) {
  check_positions_outside(DType::kBFloat16);
}

TEST(AttendForwardSm90, NothingToDo) { check_no_rows(); }

TEST(AttendForwardSm90, OtherInputsAreForTheOtherKernel) {
  const auto refused = [](const AttentionShape& shape, float scale) {
    Call call(shape);
    call.params.scale_log2 = scale;
    EXPECT_FALSE(has_attend_forward_sm90(call.params));
    EXPECT_EQ(launch_attend_forward_sm90(call.params, nullptr), cudaErrorInvalidValue);
  };
  for (const int64_t dim : {72, 96, 136, 256}) {
    refused({DType::kBFloat16, 2, 2, dim, 64}, 1.0F);
    refused({DType::kBFloat16, 2, 2, 64, dim}, 1.0F);
  }
  refused({DType::kFloat32, 2, 2}, 1.0F);
  refused({DType::kFloat16, 2, 2}, 0.0F);
  refused({DType::kFloat16, 2, 2}, -1.0F);
}

}  // namespace
}  // namespace h2o_prefill::testing
