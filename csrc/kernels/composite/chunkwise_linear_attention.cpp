#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/linear_attention.h"

namespace h2o_prefill::composite {
namespace {

at::Tensor map_features(const at::Tensor& x, FeatureMap feature_map) {
  if (feature_map == FeatureMap::kIdentity) return x;
  if (feature_map == FeatureMap::kRelu) return x.relu();
  return x.clamp_max(0).exp() + x.relu();  // above 0, the exponential is 1
}

// [B, Hkv, T, *] for every query head.
at::Tensor repeat_groups(const at::Tensor& t, int64_t query_heads) {
  return t.repeat_interleave(query_heads / t.size(1), 1);
}

// 1 / weights, and 0 where they are 0.
at::Tensor inverse_weights(const at::Tensor& weights) {
  const auto zero = weights == 0;
  return weights.masked_fill(zero, 1).reciprocal().masked_fill(zero, 0);
}

// What decays leave inside a chunk: exp(g_{j+1} + ... + g_i) at [i, j], 0 above the diagonal. Each
// entry is a sum of its own: a difference of two long sums would lose digits, and make NaN of two
// infinite ones.
at::Tensor decay_matrix(const at::Tensor& log_decay) {
  const int64_t rows = log_decay.size(2);
  const auto causal = causal_mask(rows, log_decay);
  const auto steps = log_decay.unsqueeze(3)
                         .expand({log_decay.size(0), log_decay.size(1), rows, rows})
                         .masked_fill(causal.tril(-1).logical_not(), 0);
  return steps.cumsum(2)
      .masked_fill(causal.logical_not(), -std::numeric_limits<double>::infinity())
      .exp();
}

// The recurrence of one direction, all of the accumulation type.
struct Recurrence {
  at::Tensor query;      // features [B, Hq, T, D]
  at::Tensor key;        // features [B, Hkv, T, D]
  at::Tensor value;      // [B, Hkv, T, Dv]
  at::Tensor log_decay;  // [B, Hkv, T], undefined: none
  at::Tensor state;      // [B, Hkv, D, Dv], undefined: 0
};

struct Scanned {
  at::Tensor out;    // [B, Hq, T, Dv]
  at::Tensor state;  // [B, Hkv, D, Dv], after the last token
};

// S_i = exp(g_i) S_{i-1} + k_i^T v_i, out_i = q_i S_i. Chunks are split and joined, not written to
// a part of one tensor, whose gradient would be as long as the tensor.
Scanned scan(const Recurrence& x, int64_t chunk_size) {
  const int64_t batch = x.key.size(0), heads = x.key.size(1), length = x.key.size(2);
  const int64_t group = x.query.size(1) / heads, value_dim = x.value.size(3);
  const auto queries = x.query.unflatten(1, {heads, group}).split(chunk_size, 3);
  const auto keys = x.key.split(chunk_size, 2), values = x.value.split(chunk_size, 2);
  std::vector<at::Tensor> decays;
  if (x.log_decay.defined()) decays = x.log_decay.split(chunk_size, 2);
  std::vector<at::Tensor> outs{x.query.new_empty({batch, heads, group, 0, value_dim})};
  auto state = x.state.defined() ? x.state.clone(at::MemoryFormat::Contiguous)
                                 : x.query.new_zeros({batch, heads, x.key.size(3), value_dim});
  for (int64_t i = 0; i * chunk_size < length; ++i) {
    const int64_t rows = std::min(chunk_size, length - i * chunk_size);
    // The query heads of a group are rows of one product.
    const auto query = queries[i].flatten(2, 3);
    auto key = keys[i];
    auto intra = at::matmul(query, key.transpose(2, 3)).unflatten(2, {group, rows});
    auto inter = at::matmul(query, state).unflatten(2, {group, rows});
    if (x.log_decay.defined()) {
      const auto within = decay_matrix(decays[i]);
      const auto from_start = decays[i].cumsum(2).exp().unsqueeze(3);
      intra = intra * within.unsqueeze(2);
      inter = inter * from_start.unsqueeze(2);
      state = state * from_start.narrow(2, rows - 1, 1);
      key = key * within.select(2, rows - 1).unsqueeze(3);
    }
    const auto weights = intra.tril().flatten(2, 3);
    outs.push_back(at::matmul(weights, values[i]).unflatten(2, {group, rows}) + inter);
    state = state + at::matmul(key.transpose(2, 3), values[i]);
  }
  return {at::cat(outs, 3).flatten(1, 2), state};
}

// The same by the fastest implementation that the device has.
Scanned scan_fast(const Recurrence& x, int64_t chunk_size) {
  const auto [out, last] =
      chunkwise_linear_attention(x.query, x.key, x.value, x.log_decay, LinearState{},
                                 {.feature_map = "identity", .chunk_size = chunk_size});
  return {out, last.state};
}

// Both directions. The second one is the first over reversed tensors.
Scanned scan_both(const Recurrence& x, const LinearAttentionRequest& r) {
  const auto reversed = [](const at::Tensor& t) { return t.defined() ? t.flip(2) : t; };
  const Scanned forward = scan_fast(x, r.chunk_size);
  const Scanned backward =
      scan_fast({reversed(x.query), reversed(x.key), reversed(x.value), reversed(x.log_decay), {}},
                r.chunk_size);
  auto out = forward.out + reversed(backward.out);
  if (r.diagonal_once) {
    const int64_t heads = x.query.size(1);
    const auto own = (x.query * repeat_groups(x.key, heads)).sum(3, true);
    out = out - own * repeat_groups(x.value, heads);
  }
  return {out, forward.state};
}

}  // namespace

LinearAttentionResult linear_attention(const LinearAttentionRequest& r) {
  const auto type = accumulate_type(r.query);
  Recurrence x{.query = map_features(r.query.to(type), r.feature_map),
               .key = map_features(r.key.to(type), r.feature_map),
               .value = r.value.to(type),
               .log_decay = r.decay_by_token(),
               .state = r.state};
  // A normaliser is one more dimension of the values, always 1.
  if (r.normalize) {
    x.value = at::constant_pad_nd(x.value, {0, 1}, 1);
    if (x.state.defined()) x.state = at::cat({x.state, r.normalizer.unsqueeze(3)}, 3);
  }
  const auto [sums, state] = r.causal ? scan(x, r.chunk_size) : scan_both(x, r);
  const int64_t value_dim = r.value.size(3);
  auto out = empty_heads(r.query.size(0), r.query.size(1), r.length(), value_dim, r.query);
  if (!r.normalize) {
    out.copy_(sums * r.scale);
    return {out, state, state.new_empty({r.key.size(0), r.key.size(1), 0})};
  }
  out.copy_(sums.narrow(3, 0, value_dim) * inverse_weights(sums.narrow(3, value_dim, 1)));
  return {out, state.narrow(3, 0, value_dim).contiguous(), state.select(3, value_dim).contiguous()};
}

LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& r,
                                                        const LinearAttentionGradients& gradients) {
  // Autograd, which is off below the dispatcher, differentiates the forward pass.
  const c10::InferenceMode recorded(false);
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard recording(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  LinearAttentionRequest leaves = r;
  std::vector<at::Tensor> inputs;
  for (at::Tensor* t : {&leaves.query, &leaves.key, &leaves.value, &leaves.log_decay, &leaves.state,
                        &leaves.normalizer}) {
    if (!t->defined()) continue;
    *t = (t->is_inference() ? t->clone() : t->detach()).requires_grad_();
    inputs.push_back(*t);
  }
  const auto [out, state, normalizer] = linear_attention(leaves);
  std::vector<at::Tensor> outputs, arriving;
  const auto arrives = [&](const at::Tensor& output, const at::Tensor& gradient) {
    if (!gradient.defined() || !output.requires_grad()) return;
    outputs.push_back(output);
    arriving.push_back(gradient);
  };
  arrives(out, gradients.out);
  arrives(state, gradients.state);
  arrives(normalizer, gradients.normalizer);
  std::vector<at::Tensor> found(inputs.size());
  if (!outputs.empty()) {
    found = torch::autograd::grad(outputs, inputs, arriving, /*retain_graph=*/false,
                                  /*create_graph=*/false, /*allow_unused=*/true);
  }
  size_t next = 0;
  const auto gradient_of = [&](const at::Tensor& input) {
    if (!input.defined()) return state.new_empty({0});
    const at::Tensor& gradient = found[next++];
    return gradient.defined() ? gradient.contiguous()
                              : at::zeros_like(input, at::MemoryFormat::Contiguous);
  };
  // In the order of `inputs`: a braced list is evaluated from left to right.
  return LinearAttentionInputGradients{gradient_of(leaves.query), gradient_of(leaves.key),
                                       gradient_of(leaves.value), gradient_of(leaves.log_decay),
                                       gradient_of(leaves.state), gradient_of(leaves.normalizer)};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&linear_attention>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&linear_attention_backward>);
}

}  // namespace h2o_prefill::composite
