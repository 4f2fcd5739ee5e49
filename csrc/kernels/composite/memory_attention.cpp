#include <ATen/ATen.h>
#include <torch/library.h>

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
  const auto present = (indices >= 0).unsqueeze(2).unsqueeze(2);
  const auto attended =
      attend(q, composite::gather_rows(k, indices), composite::gather_rows(v, indices), present,
             scale_or_default(scale, q.size(3)));
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  out.copy_(attended.out);
  return {out, attended.lse.contiguous(), attended.colsum.contiguous()};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("memory_attention", &memory_attention);
}

}  // namespace h2o_prefill::composite
