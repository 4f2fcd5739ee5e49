#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

at::Tensor random_decay(const Qkv& x) { return -at::rand(x.k.sizes().slice(0, 3)); }

// In float64 plain PyTorch operations compute, which tests of the Python package hold to the
// reference. Sums of 16-bit calls are float32.
TEST(ChunkwiseLinearAttention, EqualsFloat64) {
  for (const auto& [type, rounding] : {std::pair{at::kFloat, 3e-5}, std::pair{at::kHalf, 0x1p-10},
                                       std::pair{at::kBFloat16, 0x1p-7}}) {
    for (const int64_t kv_heads : {4, 1}) {
      for (const int64_t length : {1, 16, 70}) {
        const LinearAttentionOptions options{.chunk_size = 16, .normalize = kv_heads != 1};
        const auto x = random_qkv(length, 4, kv_heads, type);
        const auto decay = random_decay(x);
        const auto [out, state] = chunkwise_linear_attention(x.q, x.k, x.v, decay, {}, options);
        const auto [wide_out, wide_state] =
            chunkwise_linear_attention(x.q.to(at::kDouble), x.k.to(at::kDouble),
                                       x.v.to(at::kDouble), decay.to(at::kDouble), {}, options);
        const auto near = [&](const at::Tensor& got, const at::Tensor& expected) {
          if (expected.numel() == 0) return close(got, expected);
          return close(got, expected, 3 * rounding * (1 + expected.abs().max().item<double>()));
        };
        EXPECT_TRUE(near(out, wide_out)) << length << " tokens, " << kv_heads << ", " << type;
        EXPECT_TRUE(near(state.state, wide_state.state));
        EXPECT_TRUE(near(state.normalizer, wide_state.normalizer));
        EXPECT_EQ(out.scalar_type(), type);
        EXPECT_EQ(state.state.scalar_type(), at::kFloat);
      }
    }
  }
}

// Gradients of q, k, v, the decay and the states, where every result has one.
std::vector<at::Tensor> gradients_of(const Qkv& x, const at::Tensor& decay,
                                     const LinearState& initial,
                                     const LinearAttentionOptions& options, at::ScalarType type) {
  std::vector<at::Tensor> leaves;
  for (const auto& t : {x.q, x.k, x.v, decay, initial.state, initial.normalizer}) {
    leaves.push_back(t.defined() ? t.detach().to(type).requires_grad_() : t);
  }
  const auto [out, last] = chunkwise_linear_attention(leaves[0], leaves[1], leaves[2], leaves[3],
                                                      {leaves[4], leaves[5]}, options);
  const auto weighted = [](const at::Tensor& t) {
    return (t * at::arange(t.numel(), t.options()).cos().view(t.sizes())).sum();
  };
  auto loss = weighted(out);
  if (options.causal) loss = loss + weighted(last.state);
  if (options.causal && options.normalize) loss = loss + weighted(last.normalizer);
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& leaf : leaves) {
    if (leaf.defined()) gradients.push_back(leaf.grad());
  }
  return gradients;
}

void check_gradients(bool with_states, const LinearAttentionOptions& options) {
  const auto x = random_qkv(75, 2, 1, at::kFloat, 1);
  LinearState initial;
  if (with_states) initial.state = at::randn({1, 1, 8, kValueDim});
  if (with_states && options.normalize) initial.normalizer = at::rand({1, 1, 8}) + 1;
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
    for (const bool one : {false, true}) {
      check_gradients(/*with_states=*/one, {.normalize = normalize});
      check_gradients(/*with_states=*/false,
                      {.causal = false, .diagonal_once = one, .normalize = normalize});
    }
  }
}

TEST(ChunkwiseLinearAttention, NoTokens) {
  const auto x = random_qkv(0);
  const auto [out, state] = chunkwise_linear_attention(x.q, x.k, x.v);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
  EXPECT_TRUE(same(state.state, at::zeros({2, 2, 8, kValueDim})));
}

}  // namespace
}  // namespace h2o_prefill::testing
