#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "common/tensors.h"
#include "kernels/composite/linear_attention.h"

namespace h2o_prefill::composite {
namespace {

at::Tensor map_features(const at::Tensor& x, FeatureMap feature_map) {
  if (feature_map == FeatureMap::kIdentity) return x;
  if (feature_map == FeatureMap::kRelu) return x.relu();
  return x.clamp_max(0).exp_().add_(x.relu());  // above 0, the exponential is 1
}

// The gradient of x from the gradient of its features.
at::Tensor map_gradient(const at::Tensor& gradient, const at::Tensor& x, FeatureMap feature_map) {
  if (feature_map == FeatureMap::kIdentity) return gradient;
  if (feature_map == FeatureMap::kRelu) return gradient.masked_fill(x <= 0, 0);
  return gradient * x.clamp_max(0).exp();
}

// [B, Hq, T, *] summed over the query heads of a group: [B, Hkv, T, *].
at::Tensor sum_groups(const at::Tensor& t, int64_t heads) {
  return t.unflatten(1, {heads, t.size(1) / heads}).sum(2);
}

// [B, Hkv, T, *] for every query head.
at::Tensor repeat_groups(const at::Tensor& t, int64_t query_heads) {
  return t.repeat_interleave(query_heads / t.size(1), 1);
}

at::Tensor dot_rows(const at::Tensor& a, const at::Tensor& b) { return (a * b).sum(3, true); }

// 1 / weights, and 0 where they are 0.
at::Tensor inverse_weights(const at::Tensor& weights) {
  const auto zero = weights == 0;
  return weights.masked_fill(zero, 1).reciprocal().masked_fill(zero, 0);
}

// The tensors of a call as the recurrence takes them, in either direction: a call in both has no
// initial state.
struct Operands {
  at::Tensor query;  // features
  at::Tensor key;
  at::Tensor value;
  at::Tensor decay;
  at::Tensor state;       // [B, Hkv, D, Dv]
  at::Tensor normalizer;  // [B, Hkv, 1, D]
};

Operands operands_of(const LinearAttentionRequest& r) {
  const auto type = accumulate_type(r.query);
  return {.query = map_features(r.query.to(type), r.feature_map),
          .key = map_features(r.key.to(type), r.feature_map),
          .value = r.value.to(type),
          .decay = r.decay_by_token(),
          .state = r.state,
          .normalizer = r.normalizer.defined() ? r.normalizer.unsqueeze(2) : at::Tensor()};
}

// The recurrence in one direction of time.
struct Recurrence {
  LinearScan scan;
  int64_t chunk_size;
  bool reverse;

  Scanned operator()(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& decay, const at::Tensor& state) const {
    return scan(q, k, v, decay, state, chunk_size, reverse);
  }
  Recurrence against() const { return {scan, chunk_size, !reverse}; }
};

// The forward direction, and the backward one of a call that has both.
std::vector<Recurrence> directions_of(const LinearAttentionRequest& r, LinearScan scan) {
  const Recurrence forward{scan, r.chunk_size, /*reverse=*/false};
  if (r.causal) return {forward};
  return {forward, forward.against()};
}

// z_i [B, Hkv, T, D] of one direction, and [B, Hkv, 1, D] after its last token: the recurrence with
// one-dimensional queries and keys of 1, and keys as values.
Scanned scan_normalizer(const Operands& x, const Recurrence& scan) {
  const auto ones =
      x.key.new_ones({1, 1, 1, 1}).expand({x.key.size(0), x.key.size(1), x.key.size(2), 1});
  return scan(ones, ones, x.key, x.decay, x.normalizer);
}

// phi(q_i) . z_i [B, Hq, T, 1], of the z_i of all directions.
at::Tensor weights_of(const LinearAttentionRequest& r, const Operands& x,
                      const std::vector<Scanned>& normalizers) {
  auto z = normalizers[0].out;
  if (!r.causal) z = z + normalizers[1].out;
  return dot_rows(x.query, repeat_groups(z, x.query.size(1)));
}

struct OperandGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor decay;  // undefined: there is none
  at::Tensor state;
  at::Tensor normalizer;
};

// Gradients of the results of one direction. `weights` and `normalizer` are undefined without a
// normaliser, `state` and `normalizer` also without a gradient.
struct Arriving {
  at::Tensor out;         // [B, Hq, T, Dv], before the division
  at::Tensor weights;     // [B, Hq, T, 1]
  at::Tensor state;       // [B, Hkv, D, Dv]
  at::Tensor normalizer;  // [B, Hkv, 1, D]
};

at::Tensor transposed(const at::Tensor& state) {
  return state.defined() ? state.transpose(2, 3) : state;
}

// The sum of two tensors; either may be undefined.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

// Gradients of keys, values and initial states in one direction. The same recurrence runs against
// it, where the step between two tokens decays by what the later one decays by.
void differentiate_keys(const Operands& x, const Arriving& arriving, const Recurrence& scan,
                        OperandGradients& gradient) {
  const Recurrence against = scan.against();
  const int64_t heads = x.key.size(1), length = x.key.size(2);
  at::Tensor decay;
  if (x.decay.defined() && length > 0) {
    const auto later = x.decay.narrow(2, scan.reverse ? 0 : 1, length - 1);
    decay = at::constant_pad_nd(later, {scan.reverse ? 1 : 0, scan.reverse ? 0 : 1}, 0);
  }
  // A normaliser is one more dimension of the values, always 1.
  const bool normalize = arriving.weights.defined();
  const auto with_ones = normalize ? at::constant_pad_nd(x.value, {0, 1}, 1) : x.value;
  const auto with_weights = normalize ? at::cat({arriving.out, arriving.weights}, 3) : arriving.out;
  at::Tensor last = transposed(arriving.state);
  if (arriving.normalizer.defined()) last = at::cat({last, arriving.normalizer}, 2);

  const auto of_group = [&](const at::Tensor& t, int64_t g) {
    return t.unflatten(1, {heads, t.size(1) / heads}).select(2, g);
  };
  for (int64_t g = 0; g < x.query.size(1) / heads; ++g) {
    const auto query = of_group(x.query, g);
    const auto by_key =
        against(with_ones, of_group(with_weights, g), query, decay, g == 0 ? last : at::Tensor());
    const auto by_value = against(x.key, query, of_group(arriving.out, g), decay,
                                  g == 0 ? arriving.state : at::Tensor());
    gradient.key = sum_of(gradient.key, by_key.out);
    gradient.value = sum_of(gradient.value, by_value.out);
    gradient.state = sum_of(gradient.state, by_value.state);
    if (normalize) {
      gradient.normalizer = sum_of(gradient.normalizer, by_key.state.narrow(2, x.value.size(3), 1));
    }
  }
  if (!x.decay.defined() || length == 0) return;
  const auto first =
      x.decay.select(2, scan.reverse ? length - 1 : 0).exp().unsqueeze(2).unsqueeze(3);
  gradient.state = gradient.state * first;
  if (normalize) gradient.normalizer = gradient.normalizer * first;
}

// g_t scales every contribution of tokens before t to results from t on. Its gradient is the sum
// over these results of q . dq - k . dk, plus the share of the last states.
at::Tensor differentiate_decay(const Operands& x, const OperandGradients& gradient,
                               const at::Tensor& last, bool reverse) {
  auto flow =
      (sum_groups(dot_rows(x.query, gradient.query), x.key.size(1)) - dot_rows(x.key, gradient.key))
          .squeeze(3);
  const int64_t length = x.key.size(2);
  if (last.defined() && length > 0) flow.select(2, reverse ? 0 : length - 1).add_(last);
  return reverse ? flow.cumsum(2) : flow.flip(2).cumsum(2).flip(2);
}

// sum of a b over all but batch and heads; undefined if b is.
at::Tensor dot_heads(const at::Tensor& a, const at::Tensor& b) {
  return b.defined() ? (a * b).sum(at::IntArrayRef{2, 3}) : b;
}

}  // namespace

LinearAttentionResult linear_attention(const LinearAttentionRequest& r, LinearScan scan) {
  const Operands x = operands_of(r);
  std::vector<Scanned> found, normalizers;
  for (const Recurrence& direction : directions_of(r, scan)) {
    found.push_back(direction(x.query, x.key, x.value, x.decay, x.state));
    if (r.normalize) normalizers.push_back(scan_normalizer(x, direction));
  }
  auto weighted = found[0].out;
  if (!r.causal) weighted = weighted + found[1].out;
  weighted = weighted * (r.normalize ? inverse_weights(weights_of(r, x, normalizers))
                                     : at::scalar_tensor(r.scale, weighted.options()));
  auto out = empty_heads(r.query.size(0), r.query.size(1), r.length(), r.value.size(3), r.query);
  out.copy_(weighted);
  return {out, found[0].state,
          r.normalize ? normalizers[0].state.squeeze(2)
                      : weighted.new_empty({r.key.size(0), r.key.size(1), 0})};
}

LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& r,
                                                        const LinearAttentionGradients& gradients,
                                                        LinearScan scan) {
  const auto type = accumulate_type(r.query);
  const Operands x = operands_of(r);
  const auto directions = directions_of(r, scan);
  std::vector<Scanned> normalizers, by_query;
  Arriving arriving{
      .out = gradients.out.to(type), .weights = {}, .state = gradients.state, .normalizer = {}};
  at::Tensor inverse;
  if (r.normalize) {
    for (const auto& direction : directions) normalizers.push_back(scan_normalizer(x, direction));
    inverse = inverse_weights(weights_of(r, x, normalizers));
    arriving.out = arriving.out * inverse;
    // The gradients of state and normaliser are joined below, so a missing one becomes zeros.
    if (gradients.normalizer.defined()) {
      arriving.normalizer = gradients.normalizer.unsqueeze(2);
    } else if (arriving.state.defined()) {
      arriving.normalizer = at::zeros_like(normalizers[0].state);
    }
    if (arriving.normalizer.defined() && !arriving.state.defined()) {
      arriving.state =
          x.key.new_zeros({x.key.size(0), x.key.size(1), x.key.size(3), x.value.size(3)});
    }
  } else if (r.scale != 1.0) {
    arriving.out = arriving.out * r.scale;
  }
  // The query's gradient is S_i dout_i: the recurrence with keys and values exchanged.
  at::Tensor along;  // phi(q_i) S_i dout_i
  for (const Recurrence& direction : directions) {
    by_query.push_back(direction(arriving.out, x.value, x.key, x.decay, transposed(x.state)));
    if (r.normalize) along = sum_of(along, dot_rows(x.query, by_query.back().out));
  }
  if (r.normalize) arriving.weights = (along * inverse).neg();

  OperandGradients sum;
  for (size_t i = 0; i < directions.size(); ++i) {
    Arriving reaching = arriving;
    if (i > 0) reaching.state = reaching.normalizer = at::Tensor();  // of the forward direction
    OperandGradients one;
    one.query = by_query[i].out;
    at::Tensor last = dot_heads(transposed(by_query[i].state), reaching.state);
    if (r.normalize) {
      one.query = one.query + repeat_groups(normalizers[i].out, x.query.size(1)) * reaching.weights;
      last = sum_of(last, dot_heads(normalizers[i].state, reaching.normalizer));
    }
    differentiate_keys(x, reaching, directions[i], one);
    if (x.decay.defined()) one.decay = differentiate_decay(x, one, last, directions[i].reverse);
    sum.query = sum_of(sum.query, one.query);
    sum.key = sum_of(sum.key, one.key);
    sum.value = sum_of(sum.value, one.value);
    sum.decay = sum_of(sum.decay, one.decay);
    if (i == 0) sum.state = one.state, sum.normalizer = one.normalizer;
  }

  const auto none = sum.query.new_empty({0});
  const auto dtype = r.query.scalar_type();
  const auto by_features = [&](const at::Tensor& gradient, const at::Tensor& from) {
    return map_gradient(gradient, from.to(type), r.feature_map).to(dtype).contiguous();
  };
  at::Tensor decay = none;
  if (r.log_decay.defined()) {
    decay = r.log_decay.dim() == 1 ? sum.decay.sum(at::IntArrayRef{0, 2}) : sum.decay.contiguous();
  }
  return {by_features(sum.query, r.query),
          by_features(sum.key, r.key),
          sum.value.to(dtype).contiguous(),
          decay,
          r.state.defined() ? sum.state.contiguous() : none,
          r.normalizer.defined() ? sum.normalizer.squeeze(2).contiguous() : none};
}

namespace {

LinearAttentionResult attend_plainly(const LinearAttentionRequest& request) {
  return linear_attention(request, &linear_scan);
}

LinearAttentionInputGradients differentiate_plainly(const LinearAttentionRequest& request,
                                                    const LinearAttentionGradients& gradients) {
  return linear_attention_backward(request, gradients, &linear_scan);
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend_plainly>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&differentiate_plainly>);
}

}  // namespace h2o_prefill::composite
