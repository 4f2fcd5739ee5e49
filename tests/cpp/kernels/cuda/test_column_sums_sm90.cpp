// The column-sum kernel of sm_90a on the emulation against softmax weights in float64.
#include <gtest/gtest.h>

#include "cuda_emulation/counters.h"
#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/column_sums_sm90.h"
#include "kernels/cuda/expected_sums.h"

namespace h2o_prefill::testing {
namespace {

constexpr DType kNarrowDTypes[] = {DType::kBFloat16, DType::kFloat16};
constexpr float kBefore = 0.5F;

// A launch over chunks, or over memory sets of `count` positions if width is not 0.
struct Case {
  AttentionShape shape;
  int64_t chunk_size = 1;
  int64_t width = 0;
  int64_t count = 0;
  bool scatter_add = false;
  bool reduce_max = false;
  std::function<bool(int64_t)> skipped = [](int64_t) { return false; };  // rows with lse -inf
};

class Launch {
 public:
  explicit Launch(const Case& x) : x_(x), in_(make_inputs(x.shape)) {
    cuda_emulation::max_shared_bytes = cuda_emulation::kMaxSharedBytesOfHopper;
    const AttentionShape& shape = x.shape;
    sets_ = memory_sets(shape.batch * shape.kv_heads, x.width, x.count, shape.keys);
    params_.query = in_.query.view();
    params_.key = in_.key.view();
    params_.scale_log2 = scale_log2(in_);
    params_.rows = {.begin = 0, .count = shape.rows, .past = past()};
    params_.gathered = x.width > 0;
    params_.causal = {.begin = past(), .count = shape.rows, .chunk_size = x.chunk_size};
    params_.memory = {.positions = sets_.data(), .width = x.width};
    params_.sums_stride = by_position() ? shape.keys : x.width;
    params_.scatter_add = x.scatter_add;
    params_.reduce_max = x.reduce_max;
    const auto visible_keys = [this](int64_t b, int64_t h, int64_t t) {
      return visible(b * x_.shape.kv_heads + h, t);
    };
    expected_ = expect_sums(in_, visible_keys, x.reduce_max, x.skipped);
    params_.lse = expected_.lse.data();
  }

  // The sums as the kernel leaves them, after comparing them.
  std::vector<float> check(bool with_partial) {
    std::vector<float> sums(sets() * params_.sums_stride, kBefore);
    std::vector<float> partial(with_partial ? column_sums_sm90_partial_floats(params_) : 0,
                               std::nanf(""));
    params_.sums = sums.data();
    params_.partial = partial.empty() ? nullptr : partial.data();
    EXPECT_EQ(launch_column_sums_sm90(params_, nullptr), cudaSuccess);
    for (int64_t set = 0; set < sets(); ++set) {
      for (int64_t j = 0; j < params_.sums_stride; ++j) {
        const double expected = expected_entry(set, j);
        EXPECT_NEAR(sums[set * params_.sums_stride + j], expected, 1e-5 * std::max(1.0, expected))
            << describe() << ", KV head " << set << ", entry " << j;
        if (::testing::Test::HasFailure()) return sums;
      }
    }
    return sums;
  }

  const ColumnSumsParams& params() const { return params_; }

 private:
  int64_t past() const { return x_.shape.keys - x_.shape.rows; }
  bool by_position() const { return !params_.gathered || x_.scatter_add; }
  int64_t sets() const { return x_.shape.batch * x_.shape.kv_heads; }

  std::vector<int64_t> visible(int64_t set, int64_t t) const {
    if (params_.gathered) return members(sets_, set, x_.width);
    return range(past() + t / x_.chunk_size * x_.chunk_size, past() + t + 1);
  }

  double expected_entry(int64_t set, int64_t j) const {
    const double* const of_set = expected_.sums.data() + set * x_.shape.keys;
    if (!params_.gathered) return j < past() ? kBefore : of_set[j];
    if (x_.scatter_add) return kBefore + of_set[j];
    const int32_t position = sets_[set * x_.width + j];
    return position < 0 ? 0.0 : of_set[position];
  }

  std::string describe() const {
    return name_of(x_.shape.dtype) + ", rows " + std::to_string(x_.shape.rows) + ", dim " +
           std::to_string(x_.shape.dim) + ", heads " + std::to_string(x_.shape.heads) + ", width " +
           std::to_string(x_.width) + (params_.partial ? ", shared out" : "");
  }

  Case x_;
  AttentionInputs in_;
  std::vector<int32_t> sets_;
  ColumnSumsParams params_{};
  Sums expected_;
};

void check(const Case& x) {
  Launch launch(x);
  launch.check(false);
  if (column_sums_sm90_partial_floats(launch.params()) > 0) launch.check(true);
}

TEST(ColumnSumsSm90, RowsAroundTheTile) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t rows : {1, 64, 127, 128, 129, 300}) {
      check({.shape = {dtype, rows, rows}, .chunk_size = rows});
    }
  }
}

TEST(ColumnSumsSm90, Dims) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t dim : {8, 56, 104, 128}) {
      check({.shape = {dtype, 150, 170, dim}, .chunk_size = 150});
    }
  }
}

TEST(ColumnSumsSm90, Chunks) {
  for (const int64_t chunk_size : {30, 130}) {
    check({.shape = {DType::kBFloat16, 290, 290 + 45}, .chunk_size = chunk_size});
  }
}

TEST(ColumnSumsSm90, GroupsBatchesAndTransposedViews) {
  for (const int64_t group : {1, 3}) {
    for (const bool reduce_max : {false, true}) {
      const AttentionShape shape{DType::kBFloat16, 70, 70, 64, 64, 2 * group, 2, 2, group != 3};
      check({.shape = shape, .chunk_size = 40, .reduce_max = reduce_max});
    }
  }
}

// More query tiles than twice the ring has buffers, an odd number and an even one.
TEST(ColumnSumsSm90, RingGoesRound) {
  for (const int64_t heads : {3, 4}) {
    check({.shape = {DType::kFloat16, 300, 300, 128, 64, heads}, .chunk_size = 300});
    check({.shape = {DType::kBFloat16, 300, 140, 64, 64, heads}, .width = 130, .count = 129});
  }
}

TEST(ColumnSumsSm90, RowsThatCountNothing) {
  check({.shape = {DType::kBFloat16, 140, 140, 64, 64, 2},
         .chunk_size = 140,
         .skipped = [](int64_t t) { return t % 3 == 0; }});
  check({.shape = {DType::kFloat16, 140, 140}, .chunk_size = 140, .skipped = [](int64_t) {
           return true;
         }});
}

TEST(ColumnSumsSm90, MemorySets) {
  for (const DType dtype : kNarrowDTypes) {
    for (const int64_t width : {1, 64, 129, 200}) {
      check({.shape = {dtype, 40, 220}, .width = width, .count = width});
      check({.shape = {dtype, 40, 220}, .width = width, .count = width / 2, .scatter_add = true});
    }
    check({.shape = {dtype, 130, 300, 128}, .width = 150, .count = 131, .scatter_add = true});
  }
  check({.shape = {DType::kBFloat16, 20, 50}, .width = 70, .count = 0});
  check({.shape = {DType::kBFloat16, 20, 50}, .width = 70, .count = 0, .scatter_add = true});
}

TEST(ColumnSumsSm90, GroupsOfMemorySets) {
  for (const bool reduce_max : {false, true}) {
    check({.shape = {DType::kFloat16, 200, 90, 64, 64, 6, 2, 2, reduce_max},
           .width = 80,
           .count = 67,
           .scatter_add = !reduce_max,
           .reduce_max = reduce_max});
  }
}

TEST(ColumnSumsSm90, OrderOfThreadsDoesNotMatter) {
  Launch causal({.shape = {DType::kBFloat16, 600, 600}, .chunk_size = 600});
  Launch gathered({.shape = {DType::kFloat16, 150, 250, 128, 64, 3}, .width = 140, .count = 133});
  cuda_emulation::set_seed(0);
  const std::vector<float> first = causal.check(false);
  const std::vector<float> second = gathered.check(true);
  for (const uint64_t seed : {1, 2, 3}) {
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(first, causal.check(false));
    EXPECT_EQ(second, gathered.check(true));
  }
}

TEST(ColumnSumsSm90, WorkspaceIsThatOfTheOtherKernelOrLess) {
  ColumnSumsParams params = Launch({.shape = {DType::kBFloat16, 1, 1}}).params();
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
    Launch wide({.shape = {DType::kBFloat16, 2, 2, dim}});
    EXPECT_FALSE(has_column_sums_sm90(wide.params()));
    EXPECT_EQ(launch_column_sums_sm90(wide.params(), nullptr), cudaErrorInvalidValue);
  }
  EXPECT_FALSE(has_column_sums_sm90(Launch({.shape = {DType::kFloat32, 2, 2}}).params()));
}

}  // namespace
}  // namespace h2o_prefill::testing
