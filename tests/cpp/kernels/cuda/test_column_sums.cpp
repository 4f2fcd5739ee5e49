// The column-sum kernels on the emulation against softmax weights in float64: those for every GPU,
// and that of sm_90a.
#include <gtest/gtest.h>

#include <ostream>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/column_sums_calls.h"
#include "kernels/cuda/column_sums_sm90.h"

namespace h2o_prefill::testing {
namespace {

struct Kernel {
  const char* name;
  cudaError_t (*launch)(const ColumnSumsParams& params, cudaStream_t stream);
  int64_t (*partial_floats)(const ColumnSumsParams& params);
  size_t shared_bytes;
  std::vector<DType> dtypes;
  std::vector<DType> few_dtypes;  // for long cases
  std::vector<int64_t> dims;
  std::vector<int64_t> widths;  // of memory sets, around the tile of keys
};

void PrintTo(const Kernel& kernel, std::ostream* out) { *out << kernel.name; }

const Kernel kKernels[] = {
    {"sm80",
     launch_column_sums,
     column_sums_partial_floats,
     cuda_emulation::kMaxSharedBytes,
     {DType::kBFloat16, DType::kFloat16, DType::kFloat32},
     {DType::kBFloat16, DType::kFloat32},
     {8, 64, 80, 96, 128, 256},
     {1, 63, 64, 65, 130, 200}},
    {"sm90a",
     launch_column_sums_sm90,
     column_sums_sm90_partial_floats,
     cuda_emulation::kMaxSharedBytesOfHopper,
     {DType::kBFloat16, DType::kFloat16},
     {DType::kBFloat16},
     {8, 56, 104, 128},
     {1, 64, 129, 200}},
};

class ColumnSums : public ::testing::TestWithParam<Kernel> {
 protected:
  void SetUp() override {
    launch_tested = kernel.launch;
    partial_floats_tested = kernel.partial_floats;
    cuda_emulation::max_shared_bytes = kernel.shared_bytes;
  }

  const Kernel& kernel = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Kernels, ColumnSums, ::testing::ValuesIn(kKernels));

TEST_P(ColumnSums, RowsAroundTheTile) {
  for (const DType dtype : kernel.dtypes) {
    for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129, 260}) {
      check_sums({.shape = {dtype, rows, rows}, .chunk_size = rows});
    }
  }
}

TEST_P(ColumnSums, Dims) {
  for (const DType dtype : kernel.dtypes) {
    for (const int64_t dim : kernel.dims) {
      check_sums({.shape = {dtype, 150, 170, dim}, .chunk_size = 150});
    }
  }
}

TEST_P(ColumnSums, Chunks) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t chunk_size : {1, 30, 130}) {
      check_sums({.shape = {dtype, 290, 290 + 45}, .chunk_size = chunk_size});
    }
  }
}

TEST_P(ColumnSums, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t group : {1, 3, 4}) {
      for (const bool reduce_max : {false, true}) {
        const AttentionShape shape{dtype, 70, 70, 64, 64, 2 * group, 2, 2, group != 3};
        check_sums({.shape = shape, .chunk_size = 40, .reduce_max = reduce_max});
      }
    }
  }
}

// More query tiles than twice the ring of sm_90a has buffers, an odd number and an even one.
TEST_P(ColumnSums, ManyQueryTiles) {
  for (const int64_t heads : {3, 4}) {
    check_sums({.shape = {DType::kFloat16, 300, 300, 128, 64, heads}, .chunk_size = 300});
    check_sums({.shape = {DType::kBFloat16, 300, 140, 64, 64, heads}, .width = 130, .count = 129});
  }
}

TEST_P(ColumnSums, RowsThatCountNothing) {
  for (const DType dtype : kernel.dtypes) {
    for (const int64_t every : {1, 3}) {
      check_sums({.shape = {dtype, 140, 140, 64, 64, 2},
                  .chunk_size = 140,
                  .skipped = [=](int64_t t) { return t % every == 0; }});
    }
  }
}

TEST_P(ColumnSums, MemorySets) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t width : kernel.widths) {
      const AttentionShape shape{dtype, 40, 220};
      check_sums({.shape = shape, .width = width, .count = width});
      check_sums({.shape = shape, .width = width, .count = width / 2, .scatter_add = true});
    }
    for (const bool scatter_add : {false, true}) {
      const auto check = [&](const AttentionShape& shape, int64_t width, int64_t count) {
        check_sums({.shape = shape, .width = width, .count = count, .scatter_add = scatter_add});
      };
      check({dtype, 20, 50}, 70, 0);
      check({dtype, 130, 300, 128}, 150, 131);
      check({dtype, 200, 100, kernel.dims.back()}, 50, 41);
    }
  }
}

TEST_P(ColumnSums, GroupsOfMemorySets) {
  for (const DType dtype : kernel.few_dtypes) {
    for (const int64_t group : {1, 3, 4}) {
      for (const bool scatter_add : {false, true}) {
        check_sums({.shape = {dtype, 130, 90, 64, 64, 2 * group, 2, 2, group == 3},
                    .width = 80,
                    .count = 67,
                    .scatter_add = scatter_add,
                    .reduce_max = group != 1});
      }
    }
  }
}

TEST_P(ColumnSums, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kernel.few_dtypes) {
    SumsLaunch causal({.shape = {dtype, 600, 600}, .chunk_size = 600});
    SumsLaunch gathered({.shape = {dtype, 150, 250, 128, 64, 3}, .width = 140, .count = 133});
    causal.expect_reproducible(/*partial=*/false);
    gathered.expect_reproducible(/*partial=*/false);
    gathered.expect_reproducible(/*partial=*/true);
  }
}

TEST_P(ColumnSums, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kernel.dtypes) {
    for (const bool scatter_add : {false, true}) {
      const SumsLaunch launch(
          {.shape = {dtype, 40, 90}, .width = 4, .count = 4, .scatter_add = scatter_add});
      const auto run = [&](const std::vector<int32_t>& set) {
        std::vector<float> sums(90, kBefore);
        ColumnSumsParams params = launch.params();
        params.memory.positions = set.data();
        params.sums = sums.data();
        EXPECT_EQ(launch_tested(params, nullptr), cudaSuccess);
        return sums;
      };
      EXPECT_EQ(run({3, 40, 90, 2147483647}), run({3, 40, -1, -1}));
    }
  }
}

TEST(ColumnSumsLaunch, NothingToDo) {
  ColumnSumsParams params = SumsLaunch({.shape = {DType::kBFloat16, 5, 5}}).params();
  std::vector<float> sums(5, kBefore);
  params.gathered = true;
  params.sums = sums.data();
  ASSERT_EQ(launch_column_sums(params, nullptr), cudaSuccess);
  EXPECT_EQ(sums, std::vector<float>(5, kBefore));
}

TEST(ColumnSumsLaunch, PartialSumsAreForFewKeysAndNeverMoreForSm90) {
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
        const int64_t floats = column_sums_partial_floats(params);
        EXPECT_LE(column_sums_sm90_partial_floats(params), floats) << rows << " rows";
        with_workspace += column_sums_sm90_partial_floats(params) > 0;
        if (kv_heads == 8 && gathered && rows == 1024) {
          // 8 KV heads and 4 key tiles, by 4 heads and 2 parts of the rows: 256 blocks.
          EXPECT_EQ(floats, 32 * 2 * 512);
        } else if (kv_heads == 8 && !gathered && rows == 32768) {
          EXPECT_EQ(floats, 0);
        }
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
