#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill {
namespace {

using testing::close;
using testing::kValueDim;
using testing::Qkv;
using testing::random_qkv;
using testing::same;

at::Tensor elu_plus_one(const at::Tensor& x) { return at::elu(x.to(at::kDouble)) + 1; }

struct Expected {
  at::Tensor out;
  at::Tensor state;
  at::Tensor normalizer;
};

// Token by token, in float64; log_decay [B, Hkv, T].
Expected recurrent(const Qkv& x, const at::Tensor& log_decay, bool normalize) {
  const int64_t heads = x.k.size(1), group = x.q.size(1) / heads;
  const auto q = elu_plus_one(x.q).unflatten(1, {heads, group}), k = elu_plus_one(x.k);
  const auto v = x.v.to(at::kDouble), decay = log_decay.to(at::kDouble).exp();
  auto state = at::zeros({x.k.size(0), heads, x.k.size(3), x.v.size(3)}, at::kDouble);
  auto normalizer = at::zeros({x.k.size(0), heads, x.k.size(3)}, at::kDouble);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < x.q.size(2); ++t) {
    const auto key = k.select(2, t), kept = decay.select(2, t).unsqueeze(2);
    state = kept.unsqueeze(3) * state + key.unsqueeze(3) * v.select(2, t).unsqueeze(2);
    normalizer = kept * normalizer + key;
    const auto query = q.select(3, t);
    auto row = at::matmul(query, state);
    if (normalize) row = row / at::matmul(query, normalizer.unsqueeze(3));
    rows.push_back(row.flatten(1, 2));
  }
  return {at::stack(rows, 2), state, normalizer};
}

at::Tensor random_decay(const Qkv& x) { return -at::rand(x.k.sizes().slice(0, 3)); }

TEST(ChunkwiseLinearAttention, EqualsTheRecurrence) {
  for (const int64_t kv_heads : {4, 2, 1}) {
    for (const int64_t length : {1, 15, 16, 17, 70}) {
      for (const bool normalize : {false, true}) {
        const auto x = random_qkv(length, 4, kv_heads);
        const auto decay = random_decay(x);
        const auto expected = recurrent(x, decay, normalize);
        const auto [out, state] = chunkwise_linear_attention(
            x.q, x.k, x.v, decay, {}, {.chunk_size = 16, .normalize = normalize});
        EXPECT_TRUE(close(out, expected.out, 1e-4)) << length << " tokens, " << kv_heads;
        EXPECT_TRUE(close(state.state, expected.state, 1e-4));
        EXPECT_EQ(state.state.scalar_type(), at::kFloat);
        if (normalize) {
          EXPECT_TRUE(close(state.normalizer, expected.normalizer, 1e-4));
        } else {
          EXPECT_EQ(state.normalizer.numel(), 0);
        }
      }
    }
  }
}

TEST(ChunkwiseLinearAttention, AStateContinuesASequence) {
  const auto x = random_qkv(40, 4, 2, at::kDouble);
  const LinearAttentionOptions options{.chunk_size = 16, .normalize = true};
  const auto [whole, last] = chunkwise_linear_attention(x.q, x.k, x.v, {}, {}, options);
  LinearState state;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 30}, {30, 31}, {31, 40}}) {
    const auto part = x.tokens(begin, end);
    const auto [out, next] = chunkwise_linear_attention(part.q, part.k, part.v, {}, state, options);
    EXPECT_TRUE(close(out, whole.slice(2, begin, end), 1e-10));
    state = next;
  }
  EXPECT_TRUE(close(state.state, last.state, 1e-10));
}

TEST(ChunkwiseLinearAttention, BothDirectionsAreForwardAndReversed) {
  const auto x = random_qkv(37, 4, 2, at::kDouble);
  const auto reverse = [](const at::Tensor& t) { return t.flip(2); };
  const auto forward = std::get<0>(chunkwise_linear_attention(x.q, x.k, x.v));
  const auto backward =
      std::get<0>(chunkwise_linear_attention(reverse(x.q), reverse(x.k), reverse(x.v)));
  const auto both =
      std::get<0>(chunkwise_linear_attention(x.q, x.k, x.v, {}, {}, {.causal = false}));
  EXPECT_TRUE(close(both, forward + reverse(backward), 1e-9));
}

TEST(ChunkwiseLinearAttention, HasAGradient) {
  const auto x = random_qkv(20);
  const auto q = x.q.clone().requires_grad_();
  std::get<0>(chunkwise_linear_attention(q, x.k, x.v)).sum().backward();
  EXPECT_TRUE(q.grad().defined() && q.grad().abs().sum().item<double>() > 0);
}

// In the dtype's own rounding: sums of 16-bit calls are float32.
TEST(ChunkwiseLinearAttention, HalfPrecisionEqualsTheRecurrence) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const int64_t length : {17, 70}) {
      const auto x = random_qkv(length, 4, 2, type);
      const auto decay = random_decay(x);
      const auto expected = recurrent(x, decay, /*normalize=*/true);
      const auto [out, state] =
          chunkwise_linear_attention(x.q, x.k, x.v, decay, {}, {.normalize = true});
      const double rounding = type == at::kBFloat16 ? 0x1p-7 : 0x1p-10;
      EXPECT_EQ(out.scalar_type(), type);
      EXPECT_TRUE(close(out, expected.out, 3 * rounding)) << length << " tokens";
      EXPECT_TRUE(close(state.state, expected.state,
                        2 * rounding * expected.state.abs().max().item<double>()));
    }
  }
}

using Gradients = std::vector<at::Tensor>;

// Gradients of q, k, v, the decay and the states, where every result has one.
Gradients gradients_of(const Qkv& x, const at::Tensor& decay, const LinearState& initial,
                       const LinearAttentionOptions& options, at::ScalarType type) {
  const auto leaf = [&](const at::Tensor& t) {
    return t.defined() ? t.detach().to(type).requires_grad_() : t;
  };
  const Qkv leaves{leaf(x.q), leaf(x.k), leaf(x.v)};
  const auto log_decay = leaf(decay);
  const LinearState states{leaf(initial.state), leaf(initial.normalizer)};
  const auto [out, last] =
      chunkwise_linear_attention(leaves.q, leaves.k, leaves.v, log_decay, states, options);
  const auto weighted = [](const at::Tensor& t) {
    return (t * at::arange(t.numel(), t.options()).cos().view(t.sizes())).sum();
  };
  auto loss = weighted(out);
  if (options.causal) loss = loss + weighted(last.state);
  if (options.causal && options.normalize) loss = loss + weighted(last.normalizer);
  loss.backward();
  Gradients found{leaves.q.grad(), leaves.k.grad(), leaves.v.grad(), log_decay.grad()};
  if (states.state.defined()) found.push_back(states.state.grad());
  if (states.normalizer.defined()) found.push_back(states.normalizer.grad());
  return found;
}

void check_gradients(const Qkv& x, bool with_states, const LinearAttentionOptions& options) {
  const int64_t batch = x.k.size(0), heads = x.k.size(1), dim = x.k.size(3);
  LinearState initial;
  if (with_states) {
    initial.state = at::randn({batch, heads, dim, x.v.size(3)});
    if (options.normalize) initial.normalizer = at::rand({batch, heads, dim}) + 1;
  }
  const auto decay = random_decay(x);
  const auto got = gradients_of(x, decay, initial, options, at::kFloat);
  const auto expected = gradients_of(x, decay, initial, options, at::kDouble);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double magnitude = std::max(1.0, expected[i].abs().max().item<double>());
    EXPECT_TRUE(close(got[i], expected[i], 2e-5 * magnitude)) << "gradient " << i;
  }
}

TEST(ChunkwiseLinearAttention, GradientsAgreeWithFloat64) {
  for (const bool normalize : {false, true}) {
    for (const bool with_states : {false, true}) {
      check_gradients(random_qkv(75, 2, 1, at::kFloat, 1), with_states, {.normalize = normalize});
    }
    for (const bool once : {false, true}) {
      check_gradients(random_qkv(75, 2, 1, at::kFloat, 1), /*with_states=*/false,
                      {.causal = false, .diagonal_once = once, .normalize = normalize});
    }
  }
}

TEST(ChunkwiseLinearAttention, NoTokens) {
  const auto x = random_qkv(0);
  const auto [out, state] = chunkwise_linear_attention(x.q, x.k, x.v);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
  EXPECT_TRUE(same(state.state, at::zeros({2, 2, 8, kValueDim})));
}

TEST(ChunkwiseLinearAttention, WrongArguments) {
  const auto x = random_qkv(20);
  EXPECT_VALUE_ERROR(chunkwise_linear_attention(x.q, x.k, x.v, {}, {}, {.chunk_size = 0}),
                     "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR(chunkwise_linear_attention(x.q, x.k, x.v, at::ones({2})),
                     "log_decay must be <= 0, got 1");
  EXPECT_VALUE_ERROR_WITH(
      chunkwise_linear_attention(x.q, x.k, x.v, {}, {.state = at::zeros({2, 2, 8, 8})}),
      "initial_state must have shape [2, 2, 8, 16], got [2, 2, 8, 8]");
}

}  // namespace
}  // namespace h2o_prefill
