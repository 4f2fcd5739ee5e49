#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& indices) {
  check_gather_rows(x, indices);
  const auto shape = std::vector<int64_t>{x.size(0), x.size(1), indices.size(2), x.size(3)};
  if (x.size(2) == 0) return at::zeros(shape, x.options());
  // Rows outside of the history, which a device cannot report, are zeros too.
  const auto rows = indices.clamp(0, x.size(2) - 1);
  return x.gather(2, rows.to(at::kLong).unsqueeze(-1).expand(shape))
      .masked_fill((indices != rows).unsqueeze(-1), 0);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("gather_rows", &gather_rows);
}

}  // namespace h2o_prefill::composite
