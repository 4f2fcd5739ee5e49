#include "kernels/composite/attend.h"

#include <ATen/ATen.h>

#include <limits>

#include "common/tensors.h"

namespace h2o_prefill::composite {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

namespace {

// The share [..., 1] of a row's keys in a denominator that has the head's sink as well. lse:
// [B, Hq, T].
at::Tensor share_of_keys(const at::Tensor& lse, const at::Tensor& sinks) {
  const auto share = at::sigmoid(lse - sinks.to(lse.scalar_type()).unsqueeze(-1));
  return share.masked_fill(lse == kNegativeInfinity, 0).unsqueeze(-1);
}

}  // namespace

Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const std::optional<at::Tensor>& visible, double scale,
                const LogitOptions& options) {
  const auto type = accumulate_type(q);
  const int64_t kv_heads = k.size(1);
  const int64_t group = q.size(1) / kv_heads;
  const auto query = q.to(type).reshape({q.size(0), kv_heads, group, q.size(2), q.size(3)}) * scale;
  auto logits = at::matmul(query, k.to(type).unsqueeze(2).transpose(-1, -2));
  if (const double cap = bounded_softcap(options.softcap); cap > 0) {
    logits = at::tanh(logits / cap) * cap;
  }
  if (visible) logits = logits.masked_fill(visible->logical_not(), kNegativeInfinity);
  const auto lse = at::logsumexp(logits, -1);
  const auto shift = at::where(lse == kNegativeInfinity, at::zeros_like(lse), lse);
  auto weights = at::exp(logits - shift.unsqueeze(-1));
  const auto out = at::matmul(weights, v.to(type).unsqueeze(2));
  if (options.sinks) {
    weights = weights * share_of_keys(lse.flatten(1, 2), *options.sinks).view_as(lse.unsqueeze(-1));
  }
  const auto by_head = weights.sum(-2);
  return {out.flatten(1, 2), lse.flatten(1, 2),
          options.reduce_max ? by_head.amax(2) : by_head.sum(2)};
}

Attended merge(const Attended& a, const Attended& b) {
  const auto highest = at::maximum(a.lse, b.lse);
  const auto shift = at::where(highest == kNegativeInfinity, at::zeros_like(highest), highest);
  const auto weight_a = at::exp(a.lse - shift);
  const auto weight_b = at::exp(b.lse - shift);
  const auto total = weight_a + weight_b;
  // An empty side's output may be anything, a NaN included: it is left out, not multiplied by 0.
  const auto share = [&](const at::Tensor& out, const at::Tensor& weight) {
    return (out * (weight / total).unsqueeze(-1)).masked_fill((weight == 0).unsqueeze(-1), 0);
  };
  return {share(a.out, weight_a) + share(b.out, weight_b), shift + at::log(total), a.colsum};
}

at::Tensor out_with_sinks(const Attended& attended, const LogitOptions& options) {
  if (!options.sinks) return attended.out;
  return attended.out * share_of_keys(attended.lse, *options.sinks);
}

at::Tensor lse_with_sinks(const Attended& attended, const LogitOptions& options) {
  if (!options.sinks) return attended.lse;
  const auto sinks = options.sinks->to(attended.lse.scalar_type()).unsqueeze(-1);
  return at::logaddexp(attended.lse, sinks);
}

at::Tensor causal_mask(int64_t rows, const at::Tensor& like) {
  return at::ones({rows, rows}, like.options().dtype(at::kBool)).tril();
}

}  // namespace h2o_prefill::composite
