#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention(const at::Tensor& q,
                                                                const at::Tensor& k,
                                                                const at::Tensor& v,
                                                                const at::Tensor& indices,
                                                                std::optional<double> scale) {
  check_memory_attention(q, k, v, indices, scale);
  const int64_t width = indices.size(2);
  // No more positions than keys: the rest of each list is absent.
  const auto members = indices.narrow(2, 0, std::min(width, k.size(2)));
  const auto present = (members >= 0).unsqueeze(2).unsqueeze(2);
  const auto attended =
      attend(q, composite::gather_rows(k, members), composite::gather_rows(v, members), present,
             scale_or_default(scale, q.size(3)));
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  out.copy_(attended.out);
  const int64_t absent = width - members.size(2);
  return {out, attended.lse.contiguous(),
          at::constant_pad_nd(attended.colsum, {0, absent}).contiguous()};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("memory_attention", &memory_attention);
}

}  // namespace h2o_prefill::composite
