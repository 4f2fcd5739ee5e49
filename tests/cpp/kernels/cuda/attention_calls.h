// Calls of the attention kernels on the emulation, compared with attention in float64.
#pragma once

#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/chunk_end.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::testing {

// The kernels of an architecture, and the shapes that their tests take.
struct Kernels {
  const char* name;
  cudaError_t (*attend)(const AttendForwardParams& params, cudaStream_t stream);
  cudaError_t (*sum_columns)(const ColumnSumsParams& params, cudaStream_t stream);
  column_sums::Grid (*divide)(const ColumnSumsParams& params);
  size_t shared_bytes = 0;
  std::vector<DType> dtypes = {};
  std::vector<DType> few_dtypes = {};  // for long cases
  std::vector<int64_t> dims = {};
  std::vector<int64_t> widths = {};  // of memory sets, around the tile of keys
  std::vector<double> softcaps = {};
};

inline const Kernels* tested = nullptr;

inline constexpr float kUntouched = 4321.0F;
inline constexpr float kBefore = 0.5F;  // column sums before a call

// One call of the forward kernel: out, lse and memory_lse of all its rows, at first NaN and
// kUntouched.
struct Call {
  AttentionInputs in;
  Heads out;
  std::vector<float> lse;
  std::vector<float> memory_lse;
  AttendForwardParams params{};

  explicit Call(const AttentionShape& shape)
      : in(make_inputs(shape)),
        out(shape.dtype, shape.batch, shape.heads, shape.rows, shape.value_dim, shape.transposed,
            shape.transposed ? 8 : 0),
        lse(shape.batch * shape.heads * shape.rows, kUntouched),
        memory_lse(lse) {
    params.rows = {.begin = 0, .count = shape.rows, .past = shape.past()};
    attend_causally(0);
    params.query = in.query.view();
    params.key = in.key.view();
    params.value = in.value.view();
    params.scale_log2 = in.scale_log2();
    if (in.softcap > 0) {
      params.cap_scale = in.scale / static_cast<float>(in.softcap);
      params.scale_log2 = static_cast<float>(in.softcap) * kLog2E;
    }
    params.sinks = in.sinks.empty() ? nullptr : in.sinks.data();
  }

  // In chunks of chunk_size rows; 0: to every key up to the row.
  void attend_causally(int64_t chunk_size) {
    const int64_t begin = chunk_size ? params.rows.position() : 0;
    params.causal = {.begin = begin,
                     .count = params.rows.position() + params.rows.count - begin,
                     .chunk_size = chunk_size};
  }

  void attend_to(const std::vector<int32_t>& sets, int64_t width) {
    params.gathered = true;
    params.memory = {.positions = sets.data(), .width = width};
  }

  void run() {
    params.out = out.view();
    params.lse = lse.data();
    if (params.gathered) params.memory_lse = memory_lse.data();
    ASSERT_EQ(tested->attend(params, nullptr), cudaSuccess);
  }

  void expect_close(const Expected& expected) const {
    // Probabilities and outputs of 16 bits are rounded; values, and so both errors, are below 1.
    const double tolerance = 1e-5 + rounding(in.query.rows.dtype());
    EXPECT_LE(largest_difference(out.numbers(), expected.out), tolerance);
    EXPECT_LE(largest_difference(lse, expected.lse), 2e-5);
    EXPECT_TRUE(out.rows.gaps_untouched());
  }
};

struct SumsOptions {
  bool scatter_add = false;
  bool reduce_max = false;
  int64_t skip_every = 0;  // one of so many rows has lse -inf; 0: none
  int64_t usual_width = 0;
};

// The column sums of the keys of a call.
inline ColumnSumsParams sums_params(const Call& call, const SumsOptions& options) {
  ColumnSumsParams params{};
  params.query = call.params.query;
  params.key = call.params.key;
  params.scale_log2 = call.params.scale_log2;
  params.cap_scale = call.params.cap_scale;
  params.rows = call.params.rows;
  params.gathered = call.params.gathered;
  params.causal = call.params.causal;
  params.memory = call.params.memory;
  params.scatter_add = options.scatter_add;
  params.reduce_max = options.reduce_max;
  params.usual_width = options.usual_width;
  params.sums_stride =
      params.gathered && !options.scatter_add ? params.memory.width : params.key.length;
  return params;
}

// Sums that a launch of column sums, with its workspace, leaves to be added up.
struct PartialSums {
  column_sums::Grid grid;
  std::vector<float> workspace;
};

// partial: blocks share the tiles of chunks, too.
inline PartialSums launch_sums(const ColumnSumsParams& params, bool partial) {
  PartialSums result{.grid = tested->divide(params), .workspace = {}};
  if (partial || params.gathered) {
    result.workspace.resize(result.grid.partial_floats(), std::nanf(""));
  }
  if (!result.workspace.empty()) result.grid.params.partial = result.workspace.data();
  EXPECT_EQ(tested->sum_columns(result.grid.params, nullptr), cudaSuccess);
  return result;
}

inline std::vector<float> sum_columns(ColumnSumsParams params, const std::vector<float>& lse,
                                      bool partial) {
  const int64_t units = params.key.batch * params.key.heads;
  std::vector<float> sums(units * params.sums_stride, kBefore);
  params.lse = lse.data();
  params.sums = sums.data();
  const PartialSums parts = launch_sums(params, partial);
  if (params.scatter_add) {
    EXPECT_EQ(sums, std::vector<float>(sums.size(), kBefore));
    EXPECT_EQ(launch_chunk_end({.units = units, .sums = parts.grid}, nullptr), cudaSuccess);
  }
  return sums;
}

inline VisibleKeys causal_keys(int64_t past, int64_t chunk_size) {
  return [=](int64_t, int64_t, int64_t t) {
    return range(chunk_size ? past + t / chunk_size * chunk_size : 0, past + t + 1);
  };
}

inline void check_sums(const Call& call, const VisibleKeys& visible, const SumsOptions& options) {
  const ColumnSumsParams params = sums_params(call, options);
  const int64_t keys = params.key.length, stride = params.sums_stride;
  std::vector<float> lse = call.lse;
  for (size_t i = 0; options.skip_every && i < lse.size(); ++i) {
    if (i % params.rows.count % options.skip_every == 0) lse[i] = -HUGE_VALF;
  }
  const std::vector<double> of_position = expected_sums(call.in, visible, options.reduce_max, lse);
  const auto expected = [&](int64_t set, int64_t j) {
    const double* const of_set = &of_position[set * keys];
    if (!params.gathered) return j < params.causal.begin ? kBefore : of_set[j];
    if (options.scatter_add) return kBefore + of_set[j];
    const int32_t position = params.memory.positions[set * stride + j];
    return position < 0 ? 0.0 : of_set[position];
  };
  for (const bool partial : {false, true}) {
    if (partial && tested->divide(params).partial_floats() == 0) continue;
    const std::vector<float> sums = sum_columns(params, lse, partial);
    for (size_t i = 0; i < sums.size(); ++i) {
      const double sum = expected(static_cast<int64_t>(i) / stride, i % stride);
      ASSERT_NEAR(sums[i], sum, 1e-5 * std::max(1.0, sum))
          << "column sum " << i << (partial ? ", shared out" : "");
    }
  }
}

// Outputs, and column sums of chunks.
inline void check_causal(const AttentionShape& shape, int64_t chunk_size,
                         const SumsOptions& options = {}) {
  SCOPED_TRACE(describe(shape) + ", chunks of " + std::to_string(chunk_size));
  Call call(shape);
  call.attend_causally(chunk_size);
  call.run();
  const VisibleKeys visible = causal_keys(shape.past(), chunk_size);
  call.expect_close(attend(call.in, visible));
  if (chunk_size) check_sums(call, visible, options);
}

// Over a memory set of each head, of `count` positions in the first one, and the rest of the
// history out of sight.
inline void check_gathered(const AttentionShape& shape, int64_t width, int64_t count,
                           const SumsOptions& options = {}) {
  SCOPED_TRACE(describe(shape) + ", width " + std::to_string(width) + ", count " +
               std::to_string(count));
  const std::vector<int32_t> sets =
      memory_sets(shape.batch * shape.kv_heads, width, count, shape.keys);
  Call call(shape);
  call.attend_to(sets, width);
  call.run();
  const VisibleKeys visible = [&](int64_t b, int64_t h, int64_t) {
    return members(sets, b * shape.kv_heads + h, width);
  };
  call.expect_close(attend(call.in, visible));
  EXPECT_EQ(call.lse, call.memory_lse);
  check_sums(call, visible, options);
}

struct RecallCase {
  AttentionShape shape;
  int64_t chunk_size;
  int64_t block;
  int64_t most;  // entries of a block
  int64_t width;
  int64_t count;
};

// Calls as the whole-prefill op runs them: causal chunks, then each chunk over its memory set and
// its recalled keys, merged.
class RecallCalls {
 public:
  explicit RecallCalls(const RecallCase& x)
      : x_(x),
        past_(x.shape.past()),
        blocks_((x.shape.rows + x.block - 1) / x.block),
        // Before the call, so that no chunk holds one of them.
        sets_(memory_sets(x.shape.batch * x.shape.kv_heads, x.width, x.count, past_)) {
    // Lists of all blocks, as lexical_recall writes them: positions once a block, by rising
    // visible_from. Some are of the memory set, some not before the chunk.
    Random random(static_cast<uint32_t>(x.block));
    for (int64_t i = 0; i < x.shape.batch * blocks_; ++i) {
      const std::vector<int32_t> all = random.permutation(x.shape.keys);
      std::vector<int32_t> from(random.below(x.most + 1));
      for (int32_t& position : from) {
        position = static_cast<int32_t>(past_ + i % blocks_ * x.block + random.below(x.block));
      }
      std::sort(from.begin(), from.end());
      visible_from_.insert(visible_from_.end(), from.begin(), from.end());
      positions_.insert(positions_.end(), all.begin(), all.begin() + from.size());
      offsets_.push_back(static_cast<int32_t>(positions_.size()));
    }
  }

  Call run() const {
    Call call(x_.shape);
    call.attend_causally(x_.chunk_size);
    call.run();
    call.attend_to(sets_, x_.width);
    call.params.merge_with_out = true;
    call.params.recall = {.offsets = offsets_.data(),
                          .positions = positions_.data(),
                          .visible_from = visible_from_.data(),
                          .entries = static_cast<int64_t>(positions_.size()),
                          .block = x_.block,
                          .blocks = blocks_};
    for (int64_t row = 0; row < x_.shape.rows; row += x_.chunk_size) {
      call.params.rows = {
          .begin = row, .count = std::min(x_.chunk_size, x_.shape.rows - row), .past = past_};
      call.run();
    }
    return call;
  }

  void check() const {
    const Call call = run();
    const auto memory = [&](int64_t b, int64_t h, int64_t) {
      return members(sets_, b * x_.shape.kv_heads + h, x_.width);
    };
    const auto all = [&](int64_t b, int64_t h, int64_t t) {
      std::vector<int64_t> keys = causal_keys(past_, x_.chunk_size)(b, h, t);
      const int64_t chunk_begin = keys.front(), list = b * blocks_ + t / x_.block;
      const std::vector<int64_t> kept = memory(b, h, t);
      keys.insert(keys.end(), kept.begin(), kept.end());
      for (int32_t i = offsets_[list]; i < offsets_[list + 1]; ++i) {
        const bool known = std::count(kept.begin(), kept.end(), positions_[i]) > 0;
        if (visible_from_[i] <= past_ + t && positions_[i] < chunk_begin && !known) {
          keys.push_back(positions_[i]);
        }
      }
      return keys;
    };
    SCOPED_TRACE(describe(x_.shape) + ", block " + std::to_string(x_.block));
    call.expect_close(attend(call.in, all));
    EXPECT_LE(largest_difference(call.memory_lse, attend(call.in, memory).lse), 2e-5);
  }

 private:
  RecallCase x_;
  int64_t past_;
  int64_t blocks_;
  std::vector<int32_t> sets_;
  std::vector<int32_t> offsets_{0};
  std::vector<int32_t> positions_;
  std::vector<int32_t> visible_from_;
};

}  // namespace h2o_prefill::testing
