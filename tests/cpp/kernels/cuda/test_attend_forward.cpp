// The forward kernels on the emulation against attention in float64.
#include <gtest/gtest.h>

#include "kernels/cuda/attend_calls.h"

namespace h2o_prefill::testing {

cudaError_t launch_tested(const AttendForwardParams& params) {
  return launch_attend_forward(params, nullptr);
}

namespace {

TEST(AttendForward, RowsAroundTheTile) {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129}) {
      check_causal({dtype, rows, rows, 64, 64}, rows);
      check_causal({dtype, rows, rows + 37, 64, 64}, 0);
    }
  }
}

TEST(AttendForward, Dims) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {8, 64, 80, 96, 128, 256}) {
      for (const int64_t value_dim : {dim, int64_t{72}}) {
        check_causal({dtype, 70, 70, dim, value_dim}, 70);
      }
    }
    check_causal({dtype, 33, 40, 64, 256}, 0);
  }
}

TEST(AttendForward, Chunks) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t chunk_size : {1, 30, 130}) {
      check_causal({dtype, 290, 290 + 45, 64, 64}, chunk_size);
    }
  }
}

TEST(AttendForward, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      check_causal({dtype, 66, 66, 64, 64, 2 * group, 2, 2}, 40);
      check_causal({dtype, 66, 80, 64, 80, 2 * group, 2, 2, /*transposed=*/true}, 0);
    }
  }
}

TEST(AttendForward, Scales) {
  for (const DType dtype : kDTypes) {
    for (const float scale : {-0.3F, 0.0F, 1.0F}) {
      Call call({dtype, 140, 140});
      call.in.scale = scale;
      call.params.scale_log2 = scale_log2(call.in);
      call.attend_causally(100);
      call.run();
      expect_close(call, causal_keys(0, 100), "scale");
    }
  }
}

// Rows before and after the range keep what they had.
TEST(AttendForward, RowRange) {
  for (const DType dtype : kDTypes) {
    Call call({dtype, 100, 120}, 20);
    call.params.rows = {.begin = 60, .count = 30, .past = 20};
    call.run();
    const Expected expected = attend(call.in, causal_keys(20, 0));
    const std::vector<double> out = call.out.numbers();
    for (int64_t t = 0; t < 100; ++t) {
      const bool inside = t >= 60 && t < 90;
      EXPECT_EQ(std::isnan(out[t * 64 + 63]), !inside) << t;
      EXPECT_EQ(call.lse[t] == kUntouched, !inside) << t;
      if (inside) {
        EXPECT_NEAR(call.lse[t], expected.lse[t], 2e-5);
      }
    }
  }
}

TEST(AttendForward, LseIsNotWanted) {
  for (const DType dtype : kDTypes) {
    Call call({dtype, 40, 40});
    call.params.out = call.out.view();
    ASSERT_EQ(launch_tested(call.params), cudaSuccess);
    const Expected expected = attend(call.in, causal_keys(0, 0));
    EXPECT_LE(largest_difference(call.out.numbers(), expected.out), out_tolerance(dtype, expected));
  }
}

TEST(AttendForward, MemorySets) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t width : {1, 63, 64, 65, 130, 200}) {
      check_gathered({dtype, 40, 220}, width, width);
      check_gathered({dtype, 40, 220}, width, width / 2);
    }
    check_gathered({dtype, 20, 50}, 0, 0);
    check_gathered({dtype, 20, 50}, 70, 0);
    check_gathered({dtype, 130, 300, 128, 128}, 150, 131);
    check_gathered({dtype, 70, 300, 256, 200}, 150, 131);
    check_gathered({dtype, 50, 100, 80, 96}, 50, 41);
    for (const int64_t group : {1, 3, 4}) {
      check_gathered({dtype, 33, 90, 64, 64, 2 * group, 2, 2, group != 3}, 80, 67);
    }
  }
}

TEST(AttendForward, RecalledKeys) {
  for (const DType dtype : kLongCaseDTypes) {
    check_recall({{dtype, 200, 300, 64, 64}, 64, 64, 100, 70, 50});
    check_recall({{dtype, 150, 250, 64, 80, 4, 2, 2, true}, 60, 20, 30, 40, 40});
    check_recall({{dtype, 150, 250, 128, 128, 3, 1}, 150, 1, 3, 40, 33});
    check_recall({{dtype, 150, 220, 256, 64}, 150, 150, 200, 70, 0});
    check_recall({{dtype, 70, 170, 96, 96}, 70, 35, 150, 0, 0});
  }
}

TEST(AttendForward, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kLongCaseDTypes) {
    const RecallCase x{{dtype, 150, 250, 128, 96, 2, 1}, 100, 50, 80, 90, 77};
    const std::vector<int32_t> sets = memory_sets(1, x.width, x.count, 100);
    const Recall recall(1, 150, 100, x.block, x.most);
    expect_reproducible([&] { return run_chunks(x, sets, recall); });
  }
}

TEST(AttendForward, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kDTypes) check_positions_outside(dtype);
}

TEST(AttendForward, NothingToDo) { check_no_rows(); }

TEST(AttendForward, DimsThatHaveNoKernel) {
  Call call({DType::kFloat16, 5, 5, 264, 64});
  call.params.out = call.out.view();
  EXPECT_EQ(launch_tested(call.params), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace h2o_prefill::testing
