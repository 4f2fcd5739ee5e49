// Launches of a column-sum kernel on the emulation, compared with softmax weights in float64.
#pragma once

#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/column_sums.h"

namespace h2o_prefill::testing {

inline cudaError_t (*launch_tested)(const ColumnSumsParams& params, cudaStream_t stream);
inline int64_t (*partial_floats_tested)(const ColumnSumsParams& params);

inline constexpr float kBefore = 0.5F;  // what sums hold before a launch

// A launch over chunks, or over memory sets of `count` positions if `width` is not 0.
struct SumsCase {
  AttentionShape shape;
  int64_t chunk_size = 1;
  int64_t width = 0;
  int64_t count = 0;
  bool scatter_add = false;
  bool reduce_max = false;
  std::function<bool(int64_t)> skipped = [](int64_t) { return false; };  // rows with lse -inf
};

class SumsLaunch {
 public:
  explicit SumsLaunch(const SumsCase& x) : x_(x), in_(make_inputs(x.shape)) {
    const AttentionShape& shape = x.shape;
    sets_ = memory_sets(sets(), x.width, x.count, shape.keys);
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
    expect();
    params_.lse = lse_.data();
  }

  // The sums as the kernel leaves them, after comparing them. `partial`: the rows are shared out.
  std::vector<float> check(bool partial) {
    std::vector<float> sums(sets() * params_.sums_stride, kBefore);
    std::vector<float> workspace(partial ? partial_floats_tested(params_) : 0, std::nanf(""));
    params_.sums = sums.data();
    params_.partial = workspace.empty() ? nullptr : workspace.data();
    EXPECT_EQ(launch_tested(params_, nullptr), cudaSuccess);
    for (int64_t set = 0; set < sets(); ++set) {
      for (int64_t j = 0; j < params_.sums_stride; ++j) {
        const double expected = expected_entry(set, j);
        EXPECT_NEAR(sums[set * params_.sums_stride + j], expected, 1e-5 * std::max(1.0, expected))
            << describe(x_.shape) << ", width " << x_.width << (partial ? ", shared out" : "")
            << ", KV head " << set << ", entry " << j;
        if (::testing::Test::HasFailure()) return sums;
      }
    }
    return sums;
  }

  // In other orders of threads sums are equal to the bit.
  void expect_reproducible(bool partial) {
    cuda_emulation::set_seed(0);
    const std::vector<float> first = check(partial);
    for (const uint64_t seed : {1, 2, 3}) {
      cuda_emulation::set_seed(seed);
      EXPECT_EQ(first, check(partial));
    }
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

  // By the definition.
  void expect() {
    const int64_t keys = x_.shape.keys;
    sums_.resize(sets() * keys);
    for (int64_t b = 0; b < x_.shape.batch; ++b) {
      for (int64_t head = 0; head < x_.shape.heads; ++head) {
        const int64_t set = b * x_.shape.kv_heads + head / in_.group();
        std::vector<double> of_head(keys);
        for (int64_t t = 0; t < x_.shape.rows; ++t) {
          const std::vector<int64_t> positions = visible(set, t);
          const std::vector<double> z = logits(in_, b, head, t, positions);
          const double lse = x_.skipped(t) ? -HUGE_VAL : log_sum_exp(z);
          lse_.push_back(static_cast<float>(lse));
          if (x_.skipped(t)) continue;
          for (size_t j = 0; j < z.size(); ++j) of_head[positions[j]] += std::exp(z[j] - lse);
        }
        for (int64_t j = 0; j < keys; ++j) {
          double& sum = sums_[set * keys + j];
          sum = x_.reduce_max ? std::max(sum, of_head[j]) : sum + of_head[j];
        }
      }
    }
  }

  double expected_entry(int64_t set, int64_t j) const {
    const double* const of_set = sums_.data() + set * x_.shape.keys;
    if (!params_.gathered) return j < past() ? kBefore : of_set[j];
    if (x_.scatter_add) return kBefore + of_set[j];
    const int32_t position = sets_[set * x_.width + j];
    return position < 0 ? 0.0 : of_set[position];
  }

  SumsCase x_;
  AttentionInputs in_;
  std::vector<int32_t> sets_;
  ColumnSumsParams params_{};
  std::vector<float> lse_;    // [B, Hq, T]
  std::vector<double> sums_;  // [B, Hkv, keys], of every position
};

inline void check_sums(const SumsCase& x) {
  SumsLaunch launch(x);
  launch.check(false);
  if (partial_floats_tested(launch.params()) > 0) launch.check(true);
}

}  // namespace h2o_prefill::testing
