#include <ATen/Parallel.h>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kChunk = 24;  // three blocks of recalled keys

struct Options {
  Budgets budgets{3, 4, 1};
  int64_t dense_tail = 0;
  std::string gqa_reduce = "sum";
  RecallLists recall = {};
  int64_t error_rows = 0;
  std::optional<at::Tensor> sinks = {};
  double softcap = 0.0;

  PrefillConfig settings() const {
    return {.chunk_size = kChunk,
            .local_window = budgets.local_window,
            .heavy_budget = budgets.heavy_budget,
            .sink_tokens = budgets.sink_tokens,
            .dense_tail = dense_tail,
            .gqa_reduce = gqa_reduce,
            .error_rows = error_rows};
  }
};

RecallLists recalled(const at::Tensor& tokens, int64_t begin, int64_t matches) {
  return lexical_recall(tokens, begin, {.chunk_size = kChunk, .recall = matches});
}

// The state after the calls of a prompt.
struct State : PrefillState {
  at::Tensor out;
};

State run(const Qkv& x, const State& from = {}, const Options& o = {}) {
  const auto [out, state] = chunked_sparse_attention(x.q, x.k, x.v, from, o.settings(), o.recall,
                                                     std::nullopt, o.sinks, o.softcap);
  return {state, out};
}

at::Tensor widen(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

// The method in float64, which plain PyTorch operations compute, one chunk after the other. Tests
// of the Python package hold them to the reference.
State expected(const Qkv& x, const State& from = {}, const Options& o = {}) {
  State state = from;
  state.scores = widen(from.scores);
  return run({widen(x.q), widen(x.k), widen(x.v)}, state, o);
}

void expect_close(const State& got, const State& wanted, double tolerance = 2e-5) {
  EXPECT_TRUE(close(got.out, wanted.out, tolerance));
  EXPECT_TRUE(close(got.scores, wanted.scores, tolerance));
  EXPECT_TRUE(same(got.memory, wanted.memory));
  EXPECT_TRUE(close(got.errors, wanted.errors, tolerance));
  EXPECT_EQ(got.last_chunk_begin, wanted.last_chunk_begin);
}

TEST(ChunkedSparseAttentionOp, EqualsTheMethodInFloat64) {
  for (const int64_t kv_heads : {4, 2, 1}) {
    for (const int64_t length : {1, 23, 24, 25, 47, 90}) {
      const auto x = random_qkv(length, 4, kv_heads);
      expect_close(run(x), expected(x));
    }
  }
  const auto x = random_qkv(70);
  for (const Budgets& budgets : {Budgets{0, 0, 0}, Budgets{0, 5, 0}, Budgets{20, 0, 5}}) {
    for (const int64_t tail : {0, 30}) {
      const Options o{.budgets = budgets, .dense_tail = tail};
      expect_close(run(x, {}, o), expected(x, {}, o));
    }
  }
}

TEST(ChunkedSparseAttentionOp, SixteenBitWithEveryOption) {
  // Head dims of models, which CUDA kernels pad differently.
  for (const int64_t dim : {64, 96, 128}) {
    at::manual_seed(3);
    const auto random = [&](int64_t heads) { return at::randn({1, heads, 90, dim}, at::kHalf); };
    const Qkv x{random(4), random(2), random(2)};
    const auto tokens = at::randint(0, 12, {1, 90}, at::kLong);
    Options o;
    o.dense_tail = 10;
    o.gqa_reduce = "max";
    o.recall = recalled(tokens, 0, 2);
    if (dim == 64) o.sinks = at::arange(4, at::kHalf);
    if (dim == 96) o.softcap = 1.5;
    const auto got = run(x, {}, o), wanted = expected(x, {}, o);
    EXPECT_TRUE(close(got.out, wanted.out, 4e-3));
    EXPECT_TRUE(close(got.scores, wanted.scores, 4e-3));
    EXPECT_TRUE(same(got.memory, wanted.memory));
    EXPECT_EQ(got.out.scalar_type(), at::kHalf);
  }
}

TEST(ChunkedSparseAttentionOp, SeveralCallsWithEveryKindOfState) {
  for (const auto& [batch, heads] : {std::pair{1, 3}, {3, 2}}) {
    const auto x = random_qkv(60, 2 * heads, heads, at::kFloat, batch);
    const auto tokens = at::randint(0, 12, {batch, 60}, at::kLong);
    Options o;
    o.error_rows = 4;
    if (batch == 3) o.sinks = at::arange(2 * heads, at::kFloat), o.softcap = 1.5;
    State got, wanted;
    int64_t begin = 0;
    for (const int64_t end : {33, 60}) {
      o.recall = recalled(tokens.slice(1, 0, end), begin, 2);
      const auto call = x.call(begin, end);
      got = run(call, got, o);
      wanted = expected(call, wanted, o);
      expect_close(got, wanted);
      begin = end;
    }
    EXPECT_GT(got.errors.select(2, kDoublings).max().item<float>(), 0);
  }
}

TEST(ChunkedSparseAttentionOp, BudgetsBeyondTheHistoryTakeNoTime) {
  // Minutes and gigabytes if every step has room for all of them.
  Options o;
  o.budgets = {1 << 22, 1 << 22, 1 << 22};
  const auto x = random_qkv(40, 1, 1, at::kDouble, 1);
  const auto got = run(x, {}, o);
  EXPECT_TRUE(close(got.out, attend_causally(x).out));
  EXPECT_EQ(got.memory.size(2), 3 << 22);
  EXPECT_TRUE(same(got.memory.narrow(2, 0, kChunk).flatten(), at::arange(kChunk, at::kInt)));
  EXPECT_EQ(got.memory.narrow(2, kChunk, (3 << 22) - kChunk).max().item<int>(), -1);
}

}  // namespace
}  // namespace h2o_prefill::testing
