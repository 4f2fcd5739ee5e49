// Calls of a forward kernel on the emulation, compared with attention in float64.
#pragma once

#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/attention.h"

namespace h2o_prefill::testing {

inline cudaError_t (*launch_tested)(const AttendForwardParams& params, cudaStream_t stream);

inline constexpr float kUntouched = 4321.0F;

// One call: out, lse and memory_lse of all its rows, at first NaN and kUntouched.
struct Call {
  AttentionInputs in;
  Heads out;
  std::vector<float> lse;
  std::vector<float> memory_lse;
  AttendForwardParams params{};

  explicit Call(const AttentionShape& shape, int64_t past = 0)
      : in(make_inputs(shape)),
        out(shape.dtype, shape.batch, shape.heads, shape.rows, shape.value_dim, shape.transposed,
            shape.transposed ? 8 : 0),
        lse(shape.batch * shape.heads * shape.rows, kUntouched),
        memory_lse(lse) {
    params.rows = {.begin = 0, .count = shape.rows, .past = past};
    attend_causally(0);
    params.query = in.query.view();
    params.key = in.key.view();
    params.value = in.value.view();
    params.scale_log2 = scale_log2(in);
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

  void run(bool wants_lse = true) {
    params.out = out.view();
    if (wants_lse) params.lse = lse.data();
    if (wants_lse && params.gathered) params.memory_lse = memory_lse.data();
    ASSERT_EQ(launch_tested(params, nullptr), cudaSuccess);
  }
};

// 16-bit outputs are within twice the error of the plain computation in the dtype.
inline double out_tolerance(DType dtype, const Expected& expected) {
  if (dtype == DType::kFloat32) return 1e-5;
  return 2 * largest_difference(expected.same_type, expected.out);
}

inline void expect_close(const Call& call, const VisibleKeys& visible, const char* what) {
  const Expected expected = attend(call.in, visible);
  EXPECT_LE(largest_difference(call.out.numbers(), expected.out),
            out_tolerance(call.in.query.rows.dtype(), expected))
      << what;
  EXPECT_LE(largest_difference(call.lse, expected.lse), 2e-5) << what;
  EXPECT_TRUE(call.out.rows.gaps_untouched()) << what;
}

inline VisibleKeys causal_keys(int64_t past, int64_t chunk_size) {
  return [=](int64_t, int64_t, int64_t t) {
    return range(chunk_size ? past + t / chunk_size * chunk_size : 0, past + t + 1);
  };
}

inline void check_causal(const AttentionShape& shape, int64_t chunk_size) {
  const int64_t past = shape.keys - shape.rows;
  Call call(shape, past);
  call.attend_causally(chunk_size);
  call.run();
  expect_close(call, causal_keys(past, chunk_size), describe(shape).c_str());
}

// A memory set of each head, of `count` positions in the first one, and the rest of the history out
// of sight.
inline void check_gathered(const AttentionShape& shape, int64_t width, int64_t count) {
  const std::vector<int32_t> sets =
      memory_sets(shape.batch * shape.kv_heads, width, count, shape.keys);
  Call call(shape, shape.keys - shape.rows);
  call.attend_to(sets, width);
  call.run();
  const std::string what =
      describe(shape) + ", width " + std::to_string(width) + ", count " + std::to_string(count);
  expect_close(
      call,
      [&](int64_t b, int64_t h, int64_t) { return members(sets, b * shape.kv_heads + h, width); },
      what.c_str());
  EXPECT_EQ(call.lse, call.memory_lse) << what;
}

// Positions that a caller should not have listed are absent, and nothing is read there.
inline void check_positions_outside(DType dtype) {
  const AttentionShape shape{dtype, 40, 90};
  const auto run = [&](const std::vector<int32_t>& set, const std::vector<int32_t>& offsets,
                       const std::vector<int32_t>& recalled) {
    Call call(shape, 50);
    call.attend_to(set, static_cast<int64_t>(set.size()));
    const std::vector<int32_t> visible_from(recalled.size(), 0);
    call.params.recall = {.offsets = offsets.data(),
                          .positions = recalled.data(),
                          .visible_from = visible_from.data(),
                          .entries = static_cast<int64_t>(recalled.size()),
                          .block = 40,
                          .blocks = 1};
    call.run();
    return call;
  };
  const Call expected = run({3, 40, -1, -1}, {0, 1}, {7});
  for (const int32_t far : {90, 5000, -5, -2000000000, 2147483647}) {
    EXPECT_EQ(run({3, 40, far, far}, {0, 2}, {7, far}).out.numbers(), expected.out.numbers())
        << far;
  }
  EXPECT_EQ(run({3, 40, -1, -1}, {-3, 1000000}, {7}).out.numbers(), expected.out.numbers());
}

// Lists of recalled keys of all blocks of two batch rows, as lexical_recall writes them: positions
// once a block, by rising visible_from. Some are of the memory set, some not before the chunk.
struct Recall {
  int64_t block;
  int64_t blocks;
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> positions;
  std::vector<int32_t> visible_from;

  Recall(int64_t batch, int64_t rows, int64_t past, int64_t block, int64_t most)
      : block(block), blocks((rows + block - 1) / block) {
    Random random(static_cast<uint32_t>(block));
    for (int64_t i = 0; i < batch * blocks; ++i) {
      const int64_t begin = past + i % blocks * block;
      const std::vector<int32_t> all = random.permutation(past + rows);
      std::vector<int32_t> from;
      for (int64_t n = random.below(most + 1); n > 0; --n) {
        from.push_back(static_cast<int32_t>(begin + random.below(block)));
      }
      std::sort(from.begin(), from.end());
      visible_from.insert(visible_from.end(), from.begin(), from.end());
      positions.insert(positions.end(), all.begin(), all.begin() + from.size());
      offsets.push_back(static_cast<int32_t>(positions.size()));
    }
  }

  RecallView view() const {
    return {.offsets = offsets.data(),
            .positions = positions.data(),
            .visible_from = visible_from.data(),
            .entries = static_cast<int64_t>(positions.size()),
            .block = block,
            .blocks = blocks};
  }

  std::vector<int64_t> visible(int64_t b, int64_t t, int64_t past, int64_t chunk_begin,
                               const std::vector<int64_t>& memory) const {
    std::vector<int64_t> keys;
    const int64_t list = b * blocks + t / block;
    for (int32_t i = offsets[list]; i < offsets[list + 1]; ++i) {
      const bool known = std::count(memory.begin(), memory.end(), positions[i]) > 0;
      if (visible_from[i] <= past + t && positions[i] < chunk_begin && !known) {
        keys.push_back(positions[i]);
      }
    }
    return keys;
  }
};

struct RecallCase {
  AttentionShape shape;
  int64_t chunk_size;
  int64_t block;
  int64_t most;  // entries of a block
  int64_t width;
  int64_t count;
};

// Calls as the whole-prefill op runs them: causal chunks, then each chunk over its memory set and
// what it recalls, merged.
class RecallCalls {
 public:
  explicit RecallCalls(const RecallCase& x)
      : x_(x),
        past_(x.shape.keys - x.shape.rows),
        recall_(x.shape.batch, x.shape.rows, past_, x.block, x.most),
        // Before the call, so that no chunk holds one of them.
        sets_(memory_sets(x.shape.batch * x.shape.kv_heads, x.width, x.count, past_)) {}

  Call run() const {
    Call call(x_.shape, past_);
    call.attend_causally(x_.chunk_size);
    call.run();
    call.attend_to(sets_, x_.width);
    call.params.merge_with_out = true;
    call.params.recall = recall_.view();
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
      const std::vector<int64_t> kept = memory(b, h, t);
      const std::vector<int64_t> recalled = recall_.visible(b, t, past_, keys.front(), kept);
      keys.insert(keys.end(), kept.begin(), kept.end());
      keys.insert(keys.end(), recalled.begin(), recalled.end());
      return keys;
    };
    const std::string what = describe(x_.shape) + ", block " + std::to_string(x_.block);
    expect_close(call, all, what.c_str());
    EXPECT_LE(largest_difference(call.memory_lse, attend(call.in, memory).lse), 2e-5) << what;
  }

 private:
  RecallCase x_;
  int64_t past_;
  Recall recall_;
  std::vector<int32_t> sets_;
};

inline void check_recall(const RecallCase& x) { RecallCalls(x).check(); }

// In other orders of threads results are equal to the bit.
inline void expect_reproducible(const RecallCase& x) {
  const RecallCalls calls(x);
  cuda_emulation::set_seed(0);
  const Call first = calls.run();
  for (const uint64_t seed : {1, 2}) {
    cuda_emulation::set_seed(seed);
    const Call again = calls.run();
    EXPECT_EQ(first.out.numbers(), again.out.numbers());
    EXPECT_EQ(first.lse, again.lse);
    EXPECT_EQ(first.memory_lse, again.memory_lse);
  }
}

}  // namespace h2o_prefill::testing
