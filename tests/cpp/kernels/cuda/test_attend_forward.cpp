// The forward kernels on the emulation against attention in float64: that for every GPU, and that
// of sm_90a. The emulation has so few multiprocessors that a block of the latter takes several
// tiles of rows.
#include <gtest/gtest.h>

#include <ostream>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/attend_calls.h"
#include "kernels/cuda/attend_forward_sm90.h"

namespace h2o_prefill::testing {
namespace {

struct Kernel {
  const char* name;
  cudaError_t (*launch)(const AttendForwardParams& params, cudaStream_t stream);
  size_t shared_bytes;
  std::vector<DType> dtypes;
  std::vector<DType> few_dtypes;  // for long cases
  std::vector<int64_t> dims;
  std::vector<int64_t> widths;  // of memory sets, around the tile of keys
  std::vector<float> scales;
};

void PrintTo(const Kernel& kernel, std::ostream* out) { *out << kernel.name; }

const Kernel kKernels[] = {
    {"sm80",
     launch_attend_forward,
     cuda_emulation::kMaxSharedBytes,
     {DType::kBFloat16, DType::kFloat16, DType::kFloat32},
     {DType::kBFloat16, DType::kFloat32},
     {8, 64, 80, 96, 128, 256},
     {1, 63, 64, 65, 130, 200},
     {-0.3F, 0.0F, 1.0F}},
    {"sm90a",
     launch_attend_forward_sm90,
     cuda_emulation::kMaxSharedBytesOfHopper,
     {DType::kBFloat16, DType::kFloat16},
     {DType::kBFloat16},
     {8, 56, 104, 128},
     {1, 128, 129, 300},
     {1.0F}},
};

class AttendForward : public ::testing::TestWithParam<Kernel> {
 protected:
  void SetUp() override {
    launch_tested = kernel.launch;
    cuda_emulation::max_shared_bytes = kernel.shared_bytes;
  }

  const Kernel& kernel = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Kernels, AttendForward, ::testing::ValuesIn(kKernels));

TEST_P(AttendForward, RowsAroundTheTile) {
  for (const DType dtype : kernel.dtypes) {
    for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129}) {
      check_causal({dtype, rows, rows}, rows);
      check_causal({dtype, rows, rows + 37}, 0);
    }
  }
}

TEST_P(AttendForward, Dims) {
  for (const DType dtype : kernel.dtypes) {
    for (size_t i = 0; i < kernel.dims.size(); ++i) {
      const int64_t dim = kernel.dims[i], next = kernel.dims[(i + 1) % kernel.dims.size()];
      check_causal({dtype, 70, 70, dim, dim}, 70);
      check_causal({dtype, 33, 40, dim, next}, 0);
    }
  }
}

TEST_P(AttendForward, Chunks) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t chunk_size : {1, 30, 130}) check_causal({dtype, 150, 195}, chunk_size);
  }
}

TEST_P(AttendForward, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t group : {1, 3, 4}) {
      check_causal({dtype, 66, 66, 64, 64, 2 * group, 2, 2}, 40);
      check_causal({dtype, 66, 80, 64, 56, 2 * group, 2, 2, /*transposed=*/true}, 0);
    }
  }
}

// More tiles of keys than twice the rings of sm_90a have buffers, an odd number and an even one.
TEST_P(AttendForward, LongHistory) {
  check_causal({DType::kBFloat16, 130, 620, 128, 128, 3}, 0);
  check_causal({DType::kFloat16, 10, 700, 64, 64, 5}, 0);
}

TEST_P(AttendForward, Scales) {
  for (const DType dtype : kernel.dtypes) {
    for (const float scale : kernel.scales) {
      Call call({dtype, 140, 140});
      call.in.scale = scale;
      call.params.scale_log2 = scale_log2(call.in);
      call.attend_causally(100);
      call.run();
      expect_close(call, causal_keys(0, 100), "scale");
    }
  }
}

// Rows before and after the range keep what they had, and all where no lse is wanted.
TEST_P(AttendForward, RowRangeWithLseAndWithout) {
  for (const DType dtype : kernel.dtypes) {
    for (const bool wants_lse : {true, false}) {
      Call call({dtype, 100, 120}, 20);
      call.params.rows = {.begin = 60, .count = 30, .past = 20};
      call.run(wants_lse);
      const Expected expected = attend(call.in, causal_keys(20, 0));
      const double tolerance = out_tolerance(dtype, expected);
      const std::vector<double> out = call.out.numbers();
      for (int64_t t = 0; t < 100; ++t) {
        const bool inside = t >= 60 && t < 90;
        for (int64_t i = t * 64; i < (t + 1) * 64; ++i) {
          EXPECT_TRUE(inside ? std::fabs(out[i] - expected.out[i]) <= tolerance
                             : std::isnan(out[i]))
              << t;
        }
        EXPECT_NEAR(call.lse[t], inside && wants_lse ? expected.lse[t] : kUntouched, 2e-5) << t;
      }
    }
  }
}

TEST_P(AttendForward, MemorySets) {
  const int64_t widest = kernel.dims.back();
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t width : kernel.widths) {
      check_gathered({dtype, 40, 420}, width, width);
      check_gathered({dtype, 40, 420}, width, width / 2);
    }
    for (const int64_t width : {0, 70}) check_gathered({dtype, 20, 50}, width, 0);
    check_gathered({dtype, 130, 300, 128, 128}, 150, 131);
    check_gathered({dtype, 50, 100, widest, 56}, 50, 41);
    for (const int64_t group : {1, 3, 4}) {
      check_gathered({dtype, 33, 90, 64, 64, 2 * group, 2, 2, group != 3}, 80, 67);
    }
  }
}

TEST_P(AttendForward, RecalledKeys) {
  const int64_t widest = kernel.dims.back();
  for (const DType dtype : kernel.few_dtypes) {
    check_recall({{dtype, 200, 300}, 64, 64, 100, 70, 50});
    check_recall({{dtype, 150, 250, 64, 56, 4, 2, 2, true}, 60, 20, 30, 40, 40});
    check_recall({{dtype, 150, 250, 128, 128, 3, 1}, 150, 1, 3, 140, 133});
    check_recall({{dtype, 150, 220, widest, 64}, 150, 150, 200, 70, 0});
    check_recall({{dtype, 70, 170}, 70, 35, 150, 0, 0});
  }
}

TEST_P(AttendForward, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kernel.few_dtypes) {
    expect_reproducible({{dtype, 150, 300, 128, 104, 2, 1}, 50, 50, 80, 140, 133});
  }
}

TEST_P(AttendForward, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kernel.dtypes) check_positions_outside(dtype);
}

TEST_P(AttendForward, WithoutRowsNothingIsWritten) {
  Call call({DType::kBFloat16, 5, 5});
  call.params.rows.count = 0;
  call.run();
  EXPECT_EQ(call.lse, std::vector<float>(5, kUntouched));
}

TEST_P(AttendForward, DimsThatHaveNoKernel) {
  for (const AttentionShape& shape : {AttentionShape{DType::kFloat16, 5, 5, 264, 64},
                                      AttentionShape{DType::kFloat16, 5, 5, 64, 264}}) {
    Call call(shape);
    call.params.out = call.out.view();
    EXPECT_EQ(launch_tested(call.params, nullptr), cudaErrorInvalidValue);
  }
}

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
