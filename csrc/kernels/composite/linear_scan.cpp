#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "kernels/composite/attend.h"
#include "kernels/composite/linear_attention.h"

namespace h2o_prefill::composite {
namespace {

// The decays inside a chunk: exp(g_{j+1} + ... + g_i) at [i, j], 0 above the diagonal. Each
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

}  // namespace

Scanned linear_scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& log_decay, const at::Tensor& initial, int64_t chunk_size,
                    bool reverse) {
  if (reverse) {
    const auto flipped = [](const at::Tensor& t) { return t.defined() ? t.flip(2) : t; };
    auto found = linear_scan(flipped(q), flipped(k), flipped(v), flipped(log_decay), initial,
                             chunk_size, false);
    return {flipped(found.out), found.state};
  }
  const int64_t batch = k.size(0), heads = k.size(1), length = k.size(2);
  const int64_t group = q.size(1) / heads;
  const auto queries = q.unflatten(1, {heads, group});
  auto out = at::empty({batch, heads, group, length, v.size(3)}, q.options());
  auto state = initial.defined() ? initial.clone(at::MemoryFormat::Contiguous)
                                 : at::zeros({batch, heads, k.size(3), v.size(3)}, q.options());
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    const int64_t rows = std::min(chunk_size, length - begin);
    // The query heads of a group are rows of one product.
    const auto query = queries.narrow(3, begin, rows).flatten(2, 3);
    auto key = k.narrow(2, begin, rows);
    const auto value = v.narrow(2, begin, rows);
    auto intra = at::matmul(query, key.transpose(2, 3)).unflatten(2, {group, rows});
    auto inter = at::matmul(query, state).unflatten(2, {group, rows});
    if (log_decay.defined()) {
      const auto decay = log_decay.narrow(2, begin, rows);
      const auto within = decay_matrix(decay);
      const auto from_start = decay.cumsum(2).exp().unsqueeze(3);
      intra = intra * within.unsqueeze(2);
      inter = inter * from_start.unsqueeze(2);
      state = state * from_start.narrow(2, rows - 1, 1);
      key = key * within.select(2, rows - 1).unsqueeze(3);
    }
    const auto weights = intra.tril().flatten(2, 3);
    out.narrow(3, begin, rows)
        .copy_(at::matmul(weights, value).unflatten(2, {group, rows}).add_(inter));
    state = state + at::matmul(key.transpose(2, 3), value);
  }
  return {out.flatten(1, 2), state};
}

}  // namespace h2o_prefill::composite
