// What ends a chunk, on the emulation: in one launch and in one for each part, for threads in any
// order, to the bit. Python compares it with the reference.
#include "kernels/cuda/attention_calls.h"

namespace h2o_prefill::testing {
namespace {

const Kernels kKernels{.name = "sm80",
                       .attend = launch_attend_forward,
                       .sum_columns = launch_column_sums,
                       .divide = divide_column_sums};

struct ChunkEnd {
  AttentionShape shape;
  int64_t width;  // of the memory sets, with room for more than `count`
  int64_t count;
  int64_t measured;  // rows
  double threshold;  // of their errors
  bool reduce_max;
};

// What a chunk changes.
struct State {
  std::vector<float> scores;
  std::vector<float> errors;
  std::vector<int32_t> selected;

  bool operator==(const State&) const = default;
};

// The last rows of a history are a chunk over memory sets of what is before it.
class ChunkEndCall {
 public:
  explicit ChunkEndCall(const ChunkEnd& x)
      : x_(x),
        units_(x.shape.batch * x.shape.kv_heads),
        sets_(memory_sets(units_, x.width, x.count, x.shape.past())),
        call_(x.shape),
        rows_{.length = x.shape.rows,
              .past = x.shape.past(),
              .chunk_size = x.shape.rows,
              .count = x.measured},
        exact_(x.shape.dtype, x.shape.batch, x.shape.heads, rows_.size(), x.shape.value_dim) {
    call_.attend_to(sets_, x.width);
    call_.run();
    Random random(7);
    random.fill(exact_.rows, 1.0);
    sums_ = sums_params(call_, {.scatter_add = true, .reduce_max = x.reduce_max});
    sums_.lse = call_.lse.data();
    parts_ = launch_sums(sums_, /*partial=*/true);
    before_.scores.resize(units_ * x.shape.keys);
    for (float& score : before_.scores) score = static_cast<float>(random.below(5));
    before_.errors.resize(units_ * kErrorFields);
    for (int64_t unit = 0; unit < units_; ++unit) {
      before_.errors[unit * kErrorFields + kDoublings] = static_cast<float>(unit % 3);
    }
    before_.selected.assign(units_ * budget_.scaled(4).width(), -7);
  }

  // launches: {1, 2, 4} the sums, the errors and the selection one after another, {7} all at once.
  State run(const std::vector<int>& launches) {
    State state = before_;
    const int64_t keys = x_.shape.keys;
    parts_.grid.params.sums = state.scores.data();
    const RecordErrorsParams errors{.out = call_.out.view(),
                                    .exact = exact_.view(),
                                    .measured = rows_,
                                    .chunk = 0,
                                    .kv_heads = x_.shape.kv_heads,
                                    .widening = widening_,
                                    .errors = state.errors.data()};
    const SelectMemoryParams select{.from = {.positions = sets_.data(), .width = x_.width},
                                    .scores = state.scores.data(),
                                    .scores_stride = keys,
                                    .scores_length = keys,
                                    .chunk_begin = x_.shape.past(),
                                    .chunk_end = keys,
                                    .budget = budget_,
                                    .errors = state.errors.data(),
                                    .widening = widening_,
                                    .selected = state.selected.data(),
                                    .width = budget_.scaled(4).width()};
    for (const int parts : launches) {
      ChunkEndParams params{.units = units_};
      if (parts & 1) params.sums = parts_.grid;
      if (parts & 2) params.errors = errors;
      if (parts & 4) params.select = select;
      EXPECT_EQ(launch_chunk_end(params, nullptr), cudaSuccess);
    }
    return state;
  }

  void check() {
    const State state = run({7});
    EXPECT_FALSE(state == before_);
    for (const std::vector<int>& launches : {std::vector{1, 2, 4}, {3, 4}, {7}}) {
      cuda_emulation::set_seed(launches.size());
      EXPECT_EQ(run(launches), state);
    }
  }

 private:
  ChunkEnd x_;
  int64_t units_;
  WideningRule widening_{.threshold = x_.threshold, .most_doublings = 2};
  MemoryBudget budget_{.local_window = 3, .heavy_budget = 9, .sink_tokens = 2};
  std::vector<int32_t> sets_;
  Call call_;
  MeasuredRows rows_;
  Heads exact_;
  ColumnSumsParams sums_;
  PartialSums parts_;
  State before_;
};

TEST(ChunkEnd, EqualsItsParts) {
  tested = &kKernels;
  for (const DType dtype : kDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      const AttentionShape shape{dtype, 40, 150, 64, 72, 2 * group, 2, 2};
      SCOPED_TRACE(describe(shape));
      ChunkEndCall({.shape = shape,
                    .width = 80,
                    .count = 67,
                    .measured = group == 3 ? 40 : 4,
                    .threshold = group == 1 ? 1e9 : 0.0,
                    .reduce_max = group == 4})
          .check();
    }
  }
}

// More columns than threads, parts of the rows, and candidates beyond the registers.
TEST(ChunkEnd, LongSets) {
  tested = &kKernels;
  const AttentionShape shape{DType::kBFloat16, 200, 1500, 64, 64, 2};
  ChunkEndCall({.shape = shape,
                .width = 8200,
                .count = 1290,
                .measured = 8,
                .threshold = 0.0,
                .reduce_max = false})
      .check();
}

}  // namespace
}  // namespace h2o_prefill::testing
