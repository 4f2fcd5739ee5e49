#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b) {
  check_merge_states(out_a, lse_a, out_b, lse_b);
  const auto type = accumulate_type(out_a);
  const auto merged = merge({out_a.to(type), lse_a, {}}, {out_b.to(type), lse_b, {}});
  auto out = empty_heads(out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3), out_a);
  out.copy_(merged.out);
  return {out, merged.lse.contiguous()};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("merge_states", &merge_states);
}

}  // namespace h2o_prefill::composite
