#include "h2o_prefill/chunkwise_linear_attention.h"

#include <c10/core/InferenceMode.h>

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

// Sums over the tokens of a sequence, rounded in another order.
constexpr double kTolerance = 1e-4;

at::Tensor rows(const at::Tensor& x, int64_t begin, int64_t end) {
  return x.narrow(2, begin, end - begin);
}

void expect_calls_are_one_call(bool normalize) {
  const LinearAttentionOptions options{.chunk_size = 16, .normalize = normalize};
  const Qkv x = random_qkv(70);
  const auto decay = -at::rand({x.k.size(0), x.k.size(1), 70});
  const auto [expected, state] = chunkwise_linear_attention(x.q, x.k, x.v, decay, {}, options);
  ChunkwiseLinearAttention sequence(options);
  for (int i = 0; i < 2; ++i) {
    std::vector<at::Tensor> out;
    int64_t begin = 0;
    for (const int64_t end : {40, 41, 42, 70}) {
      out.push_back(sequence.forward(rows(x.q, begin, end), rows(x.k, begin, end),
                                     rows(x.v, begin, end), rows(decay, begin, end)));
      EXPECT_EQ(sequence.length(), end);
      begin = end;
    }
    EXPECT_TRUE(close(at::cat(out, 2), expected, kTolerance));
    EXPECT_TRUE(close(sequence.state().state, state.state, kTolerance));
    EXPECT_TRUE(close(sequence.state().normalizer, state.normalizer, kTolerance));
    sequence.reset();
    EXPECT_EQ(sequence.length(), 0);
  }
}

TEST(LinearSequence, CallsOfASequenceAreOneCall) {
  expect_calls_are_one_call(/*normalize=*/false);
  expect_calls_are_one_call(/*normalize=*/true);
}

TEST(LinearSequence, GoesOnFromSavedTensors) {
  const Qkv x = random_qkv(30);
  ChunkwiseLinearAttention sequence, other;
  other.load_state_tensors(sequence.state_tensors());
  EXPECT_EQ(other.length(), 0);
  sequence.forward(rows(x.q, 0, 20), rows(x.k, 0, 20), rows(x.v, 0, 20));
  other.load_state_tensors(sequence.state_tensors());
  EXPECT_EQ(other.length(), 20);
  const auto last = [&](ChunkwiseLinearAttention& linear) {
    return linear.forward(rows(x.q, 20, 30), rows(x.k, 20, 30), rows(x.v, 20, 30));
  };
  const auto expected = last(sequence);
  EXPECT_TRUE(same(last(other), expected));
}

TEST(LinearSequence, StateThatWasGivenOutStays) {
  const Qkv x = random_qkv(20);
  ChunkwiseLinearAttention sequence;
  sequence.forward(x.q, x.k, x.v);
  const LinearState state = sequence.state();
  const auto before = state.state.clone();
  sequence.forward(x.q, x.k, x.v);
  EXPECT_TRUE(same(state.state, before));
}

TEST(LinearSequence, CallThatThrowsChangesNothing) {
  const Qkv x = random_qkv(20);
  ChunkwiseLinearAttention sequence;
  sequence.forward(x.q, x.k, x.v);
  const auto before = sequence.state().state.clone();
  EXPECT_VALUE_ERROR_WITH(sequence.forward(x.q, x.k, rows(x.v, 0, 10)), "v must");
  const auto needs_gradient = x.q.clone().set_requires_grad(true);
  EXPECT_VALUE_ERROR_WITH(sequence.forward(needs_gradient, x.k, x.v), "q");
  EXPECT_TRUE(same(sequence.state().state, before));
  EXPECT_EQ(sequence.length(), 20);
}

TEST(LinearSequence, RefusesWrongOptionsAndTensors) {
  EXPECT_VALUE_ERROR_WITH(ChunkwiseLinearAttention({.feature_map = "gelu"}), "feature_map must be");
  EXPECT_VALUE_ERROR_WITH(ChunkwiseLinearAttention({.chunk_size = 0}), "chunk_size must be");
  EXPECT_VALUE_ERROR_WITH(ChunkwiseLinearAttention({.causal = false}), "causal must be true");
  ChunkwiseLinearAttention sequence;
  EXPECT_VALUE_ERROR_WITH(sequence.load_state_tensors({}), "1 or 3 tensors, got 0");
  const auto length = at::full({1}, 3, at::kLong);
  const auto state = at::rand({1, 2, 4, 4});
  EXPECT_VALUE_ERROR_WITH(sequence.load_state_tensors({length, state, at::rand({1, 2})}),
                          "tensors[2]");
  EXPECT_EQ(sequence.length(), 0);
}

}  // namespace
}  // namespace h2o_prefill::testing
