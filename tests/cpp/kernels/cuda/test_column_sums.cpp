// The column-sum kernels on the emulation against softmax weights in float64.
#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/expected_sums.h"

namespace h2o_prefill::testing {
namespace {

constexpr float kBefore = 0.5F;

// Inputs of a launch. sums hold kBefore at first, and `partial` is as long as it must be.
struct Call {
  AttentionInputs in;
  std::vector<float> lse;
  std::vector<float> sums;
  std::vector<float> partial;
  ColumnSumsParams params{};

  // sums: floats of a (batch row, KV head)
  Call(const AttentionShape& shape, int64_t sums_of_head)
      : in(make_inputs(shape)), sums(shape.batch * shape.kv_heads * sums_of_head, kBefore) {
    params.query = in.query.view();
    params.key = in.key.view();
    params.scale_log2 = scale_log2(in);
    params.rows = {.begin = 0, .count = shape.rows, .past = shape.keys - shape.rows};
    params.sums_stride = sums_of_head;
  }

  void run(bool with_partial) {
    params.lse = lse.data();
    params.sums = sums.data();
    partial.assign(with_partial ? column_sums_partial_floats(params) : 0, std::nanf(""));
    params.partial = partial.empty() ? nullptr : partial.data();
    ASSERT_EQ(launch_column_sums(params, nullptr), cudaSuccess);
  }
};

bool no_row(int64_t) { return false; }

void expect_near(float got, double expected, const std::string& what) {
  ASSERT_NEAR(got, expected, 1e-5 * std::max(1.0, expected)) << what;
}

std::string describe(const AttentionShape& x) {
  return name_of(x.dtype) + ", rows " + std::to_string(x.rows) + ", dim " + std::to_string(x.dim) +
         ", heads " + std::to_string(x.heads);
}

struct CausalCase {
  AttentionShape shape;
  int64_t chunk_size;
  bool reduce_max = false;
  std::function<bool(int64_t)> skipped = no_row;
};

void check_causal(const CausalCase& x, bool with_partial) {
  const AttentionShape& shape = x.shape;
  const int64_t past = shape.keys - shape.rows;
  Call call(shape, shape.keys);
  const Sums expected = expect_sums(
      call.in,
      [&](int64_t, int64_t, int64_t t) {
        return range(past + t / x.chunk_size * x.chunk_size, past + t + 1);
      },
      x.reduce_max, x.skipped);
  call.lse = expected.lse;
  call.params.causal = {.begin = past, .count = shape.rows, .chunk_size = x.chunk_size};
  call.params.reduce_max = x.reduce_max;
  call.run(with_partial);
  double total = 0.0;
  for (size_t i = 0; i < call.sums.size(); ++i) {
    const bool before = static_cast<int64_t>(i) % shape.keys < past;
    expect_near(call.sums[i], before ? kBefore : expected.sums[i],
                describe(shape) + ", entry " + std::to_string(i));
    if (!before) total += call.sums[i];
  }
  if (x.reduce_max || x.skipped(0)) return;
  EXPECT_NEAR(total / (shape.batch * shape.heads * shape.rows), 1.0, 1e-6);
}

void check_causal(const CausalCase& x) {
  check_causal(x, false);
  check_causal(x, true);
}

TEST(ColumnSums, RowsAroundTheTile) {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129, 260}) {
      check_causal({{dtype, rows, rows}, rows});
    }
  }
}

TEST(ColumnSums, Dims) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {8, 64, 80, 96, 128, 256}) {
      check_causal({{dtype, 150, 170, dim}, 150});
    }
  }
}

TEST(ColumnSums, Chunks) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t chunk_size : {1, 30, 130}) {
      check_causal({{dtype, 290, 290 + 45}, chunk_size});
    }
  }
}

TEST(ColumnSums, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      for (const bool reduce_max : {false, true}) {
        const AttentionShape shape{dtype, 70, 70, 64, 64, 2 * group, 2, 2, group != 3};
        check_causal({shape, 40, reduce_max});
      }
    }
  }
}

TEST(ColumnSums, RowsThatCountNothing) {
  for (const DType dtype : kDTypes) {
    check_causal({{dtype, 140, 140, 64, 64, 2}, 140, false, [](int64_t t) { return t % 3 == 0; }});
    check_causal({{dtype, 140, 140}, 140, false, [](int64_t) { return true; }});
  }
}

struct GatheredCase {
  AttentionShape shape;
  int64_t width;
  int64_t count;
  bool scatter_add = false;
  bool reduce_max = false;
};

std::vector<float> check_gathered(const GatheredCase& x, bool with_partial) {
  const AttentionShape& shape = x.shape;
  const std::vector<int32_t> sets =
      memory_sets(shape.batch * shape.kv_heads, x.width, x.count, shape.keys);
  Call call(shape, x.scatter_add ? shape.keys : x.width);
  const Sums expected = expect_sums(
      call.in,
      [&](int64_t b, int64_t h, int64_t) { return members(sets, b * shape.kv_heads + h, x.width); },
      x.reduce_max, no_row);
  call.lse = expected.lse;
  call.params.gathered = true;
  call.params.memory = {.positions = sets.data(), .width = x.width};
  call.params.scatter_add = x.scatter_add;
  call.params.reduce_max = x.reduce_max;
  call.run(with_partial);
  const std::string what = describe(shape) + ", width " + std::to_string(x.width);
  for (int64_t set = 0; set < shape.batch * shape.kv_heads; ++set) {
    const double* of_set = expected.sums.data() + set * shape.keys;
    if (x.scatter_add) {
      for (int64_t j = 0; j < shape.keys; ++j) {
        expect_near(call.sums[set * shape.keys + j], kBefore + of_set[j], what);
      }
      continue;
    }
    double total = 0.0;
    for (int64_t j = 0; j < x.width; ++j) {
      const int32_t position = sets[set * x.width + j];
      const float sum = call.sums[set * x.width + j];
      expect_near(sum, position < 0 ? 0.0 : of_set[position], what);
      total += sum;
    }
    if (!x.reduce_max && sets[set * x.width] >= 0) {
      EXPECT_NEAR(total / (call.in.group() * shape.rows), 1.0, 1e-6) << what;
    }
  }
  return call.sums;
}

void check_gathered(const GatheredCase& x) {
  check_gathered(x, false);
  check_gathered(x, true);
}

TEST(ColumnSums, MemorySets) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t width : {1, 63, 64, 65, 130, 200}) {
      check_gathered({{dtype, 40, 220}, width, width});
      check_gathered({{dtype, 40, 220}, width, width / 2, /*scatter_add=*/true});
    }
    check_gathered({{dtype, 20, 50}, 70, 0});
    check_gathered({{dtype, 20, 50}, 70, 0, true});
    check_gathered({{dtype, 130, 300, 128}, 150, 131, true});
    check_gathered({{dtype, 70, 300, 256}, 150, 131});
    check_gathered({{dtype, 200, 100, 80}, 50, 41});
  }
}

TEST(ColumnSums, GroupsOfMemorySets) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      check_gathered({{dtype, 130, 90, 64, 64, 2 * group, 2, 2, group == 3}, 80, 67, group == 1});
    }
    check_gathered({{dtype, 130, 90, 64, 64, 6, 2}, 80, 67, false, /*reduce_max=*/true});
    for (const bool scatter_add : {false, true}) {
      check_gathered({{dtype, 70, 90, 64, 64, 4, 1}, 80, 80, scatter_add, /*reduce_max=*/true});
    }
  }
}

TEST(ColumnSums, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const bool with_partial : {false, true}) {
      const GatheredCase x{{dtype, 150, 250, 128, 64, 3}, 140, 133};
      cuda_emulation::set_seed(0);
      const std::vector<float> first = check_gathered(x, with_partial);
      for (const uint64_t seed : {1, 2}) {
        cuda_emulation::set_seed(seed);
        EXPECT_EQ(first, check_gathered(x, with_partial));
      }
    }
  }
}

TEST(ColumnSums, PartialSumsAreForFewKeys) {
  Call few({DType::kBFloat16, 1, 1}, 1);
  few.params.gathered = true;
  few.params.query.heads = 32;
  few.params.key.heads = 8;
  few.params.rows.count = 1024;
  few.params.memory.width = 512;
  // 8 KV heads and 4 key tiles, by 4 heads and 2 parts of the rows: 256 blocks.
  EXPECT_EQ(column_sums_partial_floats(few.params), 32 * 2 * 512);
  few.params.gathered = false;
  few.params.rows.count = 32768;
  few.params.causal = {.begin = 0, .count = 32768, .chunk_size = 1024};
  EXPECT_EQ(column_sums_partial_floats(few.params), 0);
}

TEST(ColumnSums, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kDTypes) {
    for (const bool scatter_add : {false, true}) {
      const AttentionShape shape{dtype, 40, 90};
      const auto run = [&](const std::vector<int32_t>& set) {
        Call call(shape, 90);
        call.lse.assign(shape.heads * shape.rows, 1.0F);
        call.params.gathered = true;
        call.params.memory = {.positions = set.data(), .width = static_cast<int64_t>(set.size())};
        call.params.scatter_add = scatter_add;
        call.run(false);
        return call.sums;
      };
      EXPECT_EQ(run({3, 40, 90, 2147483647}), run({3, 40, -1, -1}));
    }
  }
}

TEST(ColumnSums, NothingToDo) {
  Call call({DType::kBFloat16, 5, 5}, 5);
  call.params.gathered = true;
  call.run(true);
  EXPECT_EQ(call.sums, std::vector<float>(5, kBefore));
}

}  // namespace
}  // namespace h2o_prefill::testing
