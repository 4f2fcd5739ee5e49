#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention(const at::Tensor& q,
                                                                     const at::Tensor& k,
                                                                     const at::Tensor& v,
                                                                     int64_t chunk_size,
                                                                     std::optional<double> scale) {
  check_intra_chunk_attention(q, k, v, chunk_size, scale);
  const int64_t length = q.size(2);
  const auto options = q.options().dtype(accumulate_type(q));
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, options);
  auto colsum = at::empty({k.size(0), k.size(1), length}, options);
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    const int64_t rows = std::min(chunk_size, length - begin);
    const auto chunk = [&](const at::Tensor& t) { return t.narrow(2, begin, rows); };
    const auto attended = attend(chunk(q), chunk(k), chunk(v), causal_mask(rows, q),
                                 scale_or_default(scale, q.size(3)));
    chunk(out).copy_(attended.out);
    chunk(lse).copy_(attended.lse);
    chunk(colsum).copy_(attended.colsum);
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention);
}

}  // namespace h2o_prefill::composite
