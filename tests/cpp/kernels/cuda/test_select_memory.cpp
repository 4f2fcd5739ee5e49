// The selection kernel against a sort, to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/chunk_end.h"

namespace h2o_prefill {
namespace {

struct Problem {
  int64_t heads = 1;
  int64_t old_width = 0;
  int64_t scores_length = 0;
  int64_t chunk_begin = 0;
  int64_t chunk_end = 0;
  int64_t local_window = 0;
  int64_t heavy_budget = 0;
  int64_t sink_tokens = 0;
  std::vector<float> scores = {};    // [heads, scores_length + 3]
  std::vector<int32_t> memory = {};  // [heads, old_width]
  bool widened = false;              // each head once more than the one before

  int64_t stride() const { return scores_length + 3; }
  int32_t factor(int64_t head) const { return widened ? 1 << head : 1; }
  int64_t width() const { return sink_tokens + factor(heads - 1) * (local_window + heavy_budget); }
};

// Lists of different lengths, entries of the coming chunk among them; scores of `distinct` values.
Problem random_problem(Problem p, int distinct, unsigned seed) {
  std::mt19937 random(seed);
  p.scores.resize(p.heads * p.stride());
  for (float& score : p.scores) {
    score = static_cast<float>(random() % distinct) * (distinct > 100 ? 1e-3F : 1.0F);
  }
  p.memory.assign(p.heads * p.old_width, -1);
  for (int64_t head = 0; head < p.heads; ++head) {
    std::vector<int32_t> positions(p.chunk_begin);
    for (int64_t i = 0; i < p.chunk_begin; ++i) positions[i] = static_cast<int32_t>(i);
    std::shuffle(positions.begin(), positions.end(), random);
    const int64_t count =
        std::min<int64_t>(p.chunk_begin, head % 3 == 1 ? p.old_width / 2 : p.old_width);
    std::sort(positions.begin(), positions.begin() + count);
    std::copy_n(positions.begin(), count, p.memory.begin() + head * p.old_width);
  }
  return p;
}

std::vector<int32_t> expected(const Problem& p, int64_t head) {
  const int64_t local_begin = std::max<int64_t>(p.chunk_end - p.factor(head) * p.local_window, 0);
  const int64_t sink_end = std::min(p.sink_tokens, local_begin);
  std::vector<std::pair<float, int32_t>> candidates;
  const auto consider = [&](int64_t position) {
    if (position < sink_end || position >= local_begin) return;
    float score = position < p.scores_length ? p.scores[head * p.stride() + position] : 0.0F;
    if (std::isnan(score)) score = std::numeric_limits<float>::lowest();
    candidates.emplace_back(score, static_cast<int32_t>(position));
  };
  for (int64_t i = 0; i < p.old_width; ++i) {
    const int32_t position = p.memory[head * p.old_width + i];
    if (position >= 0 && position < p.chunk_begin) consider(position);
  }
  for (int64_t position = p.chunk_begin; position < p.chunk_end; ++position) consider(position);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  candidates.resize(std::min<size_t>(candidates.size(), p.factor(head) * p.heavy_budget));

  std::vector<int32_t> set;
  for (int64_t position = 0; position < sink_end; ++position) {
    set.push_back(static_cast<int32_t>(position));
  }
  for (const auto& candidate : candidates) set.push_back(candidate.second);
  for (int64_t position = local_begin; position < p.chunk_end; ++position) {
    set.push_back(static_cast<int32_t>(position));
  }
  std::sort(set.begin(), set.end());
  set.resize(p.width(), -1);
  return set;
}

void check(const Problem& p) {
  SCOPED_TRACE(::testing::Message()
               << "old_width " << p.old_width << ", scores " << p.scores_length << ", chunk ["
               << p.chunk_begin << ", " << p.chunk_end << "), L " << p.local_window << ", H "
               << p.heavy_budget << ", K " << p.sink_tokens);
  std::vector<int32_t> selected(p.heads * p.width(), -7);
  std::vector<float> errors(p.heads * kErrorFields);
  for (int64_t head = 0; head < p.heads; ++head) {
    errors[head * kErrorFields + kDoublings] = static_cast<float>(head);
  }
  const SelectMemoryParams params{.from = {.positions = p.memory.data(), .width = p.old_width},
                                  .scores = p.scores.data(),
                                  .scores_stride = p.stride(),
                                  .scores_length = p.scores_length,
                                  .chunk_begin = p.chunk_begin,
                                  .chunk_end = p.chunk_end,
                                  .budget = {p.local_window, p.heavy_budget, p.sink_tokens},
                                  .errors = p.widened ? errors.data() : nullptr,
                                  .widening = {.threshold = 0.0, .most_doublings = p.heads},
                                  .selected = selected.data(),
                                  .width = p.width()};
  ASSERT_EQ(launch_chunk_end({.units = p.heads, .select = params}, nullptr), cudaSuccess);
  for (int64_t head = 0; head < p.heads; ++head) {
    const std::vector<int32_t> of_head(selected.begin() + head * p.width(),
                                       selected.begin() + (head + 1) * p.width());
    ASSERT_EQ(of_head, expected(p, head)) << "head " << head;
  }
}

TEST(SelectMemory, CandidatesAroundTheSizesOfACtaAndItsRegisters) {
  for (const int64_t candidates : {0, 1, 255, 256, 257, 1280, 4096, 4097, 8193}) {
    for (const int distinct : {2, 100000}) {
      cuda_emulation::set_seed(static_cast<unsigned>(candidates));
      const int64_t old = candidates / 4, end = candidates + old;
      check(random_problem({.heads = 3,
                            .old_width = old,
                            .scores_length = end,
                            .chunk_begin = 2 * old,
                            .chunk_end = end,
                            .local_window = candidates / 5,
                            .heavy_budget = candidates / 3,
                            .sink_tokens = 3,
                            .widened = distinct == 2},
                           distinct, static_cast<unsigned>(distinct)));
    }
  }
}

// Scores that the operator may be given by hand: any order of floats that a sort would find.
TEST(SelectMemory, AnyFloatRanksAsInASort) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  const std::vector<float> scores{-0.0F, 0.0F, kNan,  -kMax, kMax, -kInf, kInf,
                                  kTiny, 1.0F, -1.0F, -kNan, 0.0F, -kTiny};
  for (int64_t heavy = 0; heavy <= static_cast<int64_t>(scores.size()); ++heavy) {
    Problem p;
    p.scores_length = p.chunk_end = static_cast<int64_t>(scores.size());
    p.heavy_budget = heavy;
    p.scores = scores;
    p.scores.resize(p.stride());
    check(p);
  }
}

}  // namespace
}  // namespace h2o_prefill
