// What ends a chunk, on the emulation: against float64 and a sort, and in one launch against one
// for each part.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/attention_calls.h"

namespace h2o_prefill::testing {
namespace {

const Kernels kKernels{.name = "sm80",
                       .attend = launch_attend_forward,
                       .sum_columns = launch_column_sums,
                       .divide = divide_column_sums};

// The memory set of one KV head by a sort.
std::vector<int32_t> expected_set(const SelectMemoryParams& x, int64_t unit) {
  const float* const errors = x.errors ? x.errors + unit * kErrorFields : nullptr;
  const MemoryBudget budget =
      x.budget.scaled(errors ? int64_t{1} << static_cast<int>(errors[kDoublings]) : 1);
  const int64_t local_begin = std::max<int64_t>(x.chunk_end - budget.local_window, 0);
  const int64_t sink_end = std::min(budget.sink_tokens, local_begin);
  std::vector<std::pair<float, int64_t>> candidates;
  const auto consider = [&](int64_t position) {
    if (position < sink_end || position >= local_begin) return;
    float score = position < x.scores_length ? x.scores[unit * x.scores_stride + position] : 0.0F;
    if (std::isnan(score)) score = std::numeric_limits<float>::lowest();
    candidates.emplace_back(score, position);
  };
  for (int64_t i = 0; i < x.from.width; ++i) {
    const int32_t position = x.from.positions[unit * x.from.width + i];
    if (position >= 0 && position < x.chunk_begin) consider(position);
  }
  for (int64_t position = x.chunk_begin; position < x.chunk_end; ++position) consider(position);
  std::ranges::stable_sort(candidates, std::greater(), &std::pair<float, int64_t>::first);
  candidates.resize(std::min<size_t>(candidates.size(), budget.heavy_budget));

  std::vector<int32_t> set;
  for (int64_t position = 0; position < x.chunk_end; ++position) {
    if (position < sink_end || position >= local_begin) set.push_back(position);
  }
  for (const auto& candidate : candidates) set.push_back(candidate.second);
  std::ranges::sort(set);
  set.resize(x.width, -1);
  return set;
}

void expect_selected(const SelectMemoryParams& x, int64_t units) {
  for (int64_t unit = 0; unit < units; ++unit) {
    const int32_t* const set = x.selected + unit * x.width;
    ASSERT_EQ(std::vector<int32_t>(set, set + x.width), expected_set(x, unit)) << unit;
  }
}

// Selects sets of all scores of `units` heads, [units, length], and compares them.
void check_selection(const std::vector<float>& scores, int64_t units, SelectMemoryParams x) {
  x.scores = scores.data();
  x.scores_stride = static_cast<int64_t>(scores.size()) / units;
  std::vector<int32_t> selected(units * x.width, -7);
  x.selected = selected.data();
  ASSERT_EQ(launch_chunk_end({.units = units, .select = x}, nullptr), cudaSuccess);
  expect_selected(x, units);
}

// Around the sizes of a CTA and of its registers. Each head is once more widened than the one
// before; there are ties, or hardly any.
TEST(SelectMemory, EqualsASort) {
  constexpr int64_t kUnits = 3;
  std::vector<float> errors(kUnits * kErrorFields);
  for (int64_t unit = 0; unit < kUnits; ++unit) {
    errors[unit * kErrorFields + kDoublings] = static_cast<float>(unit);
  }
  for (const int64_t candidates : {0, 1, 255, 256, 257, 1280, 4096, 4097, 8193}) {
    for (const int64_t distinct : {2, 100000}) {
      SCOPED_TRACE(std::to_string(candidates) + " of " + std::to_string(distinct));
      cuda_emulation::set_seed(candidates);
      const int64_t old = candidates / 4, end = candidates + old;
      Random random(distinct);
      std::vector<float> scores(kUnits * (end + 3));
      for (float& score : scores) score = static_cast<float>(random.below(distinct));
      const std::vector<int32_t> sets = memory_sets(kUnits, old, old, 2 * old);
      SelectMemoryParams x{};
      x.from = {.positions = sets.data(), .width = old};
      x.scores_length = x.chunk_end = end;
      x.chunk_begin = 2 * old;
      x.budget = {candidates / 5, candidates / 3, 3};
      x.errors = distinct == 2 ? errors.data() : nullptr;
      x.widening = {.threshold = 0.0, .most_doublings = kUnits};
      x.width = x.budget.scaled(4).width();
      check_selection(scores, kUnits, x);
    }
  }
}

// Scores that the operator may be given by hand: any order of floats that a sort would find.
TEST(SelectMemory, AnyFloatRanksAsInASort) {
  using Limits = std::numeric_limits<float>;
  constexpr float kInf = Limits::infinity(), kNan = Limits::quiet_NaN(), kMax = Limits::max();
  constexpr float kTiny = Limits::denorm_min();
  const std::vector<float> scores{-0.0F, 0.0F, kNan,  -kMax, kMax, -kInf, kInf,
                                  kTiny, 1.0F, -1.0F, -kNan, 0.0F, -kTiny};
  SelectMemoryParams x{};
  x.scores_length = x.chunk_end = std::ssize(scores);
  for (x.width = 0; x.width <= x.chunk_end; ++x.width) {
    x.budget.heavy_budget = x.width;
    check_selection(scores, 1, x);
  }
}

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
                                    .widening = widening(),
                                    .errors = state.errors.data()};
    select_ = {.from = {.positions = sets_.data(), .width = x_.width},
               .scores = state.scores.data(),
               .scores_stride = keys,
               .scores_length = keys,
               .chunk_begin = x_.shape.past(),
               .chunk_end = keys,
               .budget = budget_,
               .errors = state.errors.data(),
               .widening = widening(),
               .selected = state.selected.data(),
               .width = budget_.scaled(4).width()};
    for (const int parts : launches) {
      ChunkEndParams params{.units = units_};
      if (parts & 1) params.sums = parts_.grid;
      if (parts & 2) params.errors = errors;
      if (parts & 4) params.select = select_;
      EXPECT_EQ(launch_chunk_end(params, nullptr), cudaSuccess);
    }
    return state;
  }

  void check() {
    State state = run({7});
    EXPECT_EQ(run({1, 2, 4}), state);
    EXPECT_EQ(run({3}), (State{state.scores, state.errors, before_.selected}));
    for (int64_t unit = 0; unit < units_; ++unit) {
      const float* const was = &before_.errors[unit * kErrorFields];
      const float* const is = &state.errors[unit * kErrorFields];
      const double error = expected_error(unit);
      EXPECT_NEAR(is[kErrorSum], error, 1e-5 * error);
      EXPECT_EQ(is[kErrorCount], 1.0F);
      EXPECT_EQ(is[kFactorSum], std::exp2(was[kDoublings]));
      const bool widens = error > x_.threshold && was[kDoublings] < 2.0F;
      EXPECT_EQ(is[kDoublings], was[kDoublings] + (widens ? 1.0F : 0.0F));
    }
    select_.scores = state.scores.data();
    select_.errors = state.errors.data();
    select_.selected = state.selected.data();
    expect_selected(select_, units_);
  }

 private:
  WideningRule widening() const { return {.threshold = x_.threshold, .most_doublings = 2}; }

  double expected_error(int64_t unit) const {
    const int64_t dim = x_.shape.value_dim, group = call_.in.group();
    const std::vector<double> out = call_.out.numbers(), exact = exact_.numbers();
    double error = 0.0;
    for (int64_t head = unit * group; head < (unit + 1) * group; ++head) {
      for (int64_t i = 0; i < rows_.size(); ++i) {
        double missed = 0.0, whole = 0.0;
        for (int64_t d = 0; d < dim; ++d) {
          const double y = exact[(head * rows_.size() + i) * dim + d];
          const double x = out[(head * x_.shape.rows + rows_.row(i)) * dim + d];
          missed += (x - y) * (x - y);
          whole += y * y;
        }
        error += missed / whole;
      }
    }
    return error / static_cast<double>(group * rows_.size());
  }

  ChunkEnd x_;
  int64_t units_;
  MemoryBudget budget_{.local_window = 3, .heavy_budget = 9, .sink_tokens = 2};
  std::vector<int32_t> sets_;
  Call call_;
  MeasuredRows rows_;
  Heads exact_;
  ColumnSumsParams sums_;
  PartialSums parts_;
  State before_;
  SelectMemoryParams select_{};
};

TEST(ChunkEnd, EqualsItsPartsAndFloat64) {
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

TEST(ChunkEnd, OrderOfThreadsDoesNotMatter) {
  tested = &kKernels;
  ChunkEndCall call({.shape = {DType::kBFloat16, 130, 300, 64, 64, 4, 2},
                     .width = 150,
                     .count = 140,
                     .measured = 8,
                     .threshold = 0.0,
                     .reduce_max = false});
  cuda_emulation::set_seed(0);
  const State first = call.run({7});
  for (const uint64_t seed : {1, 2}) {
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(call.run({7}), first);
  }
}

}  // namespace
}  // namespace h2o_prefill::testing
