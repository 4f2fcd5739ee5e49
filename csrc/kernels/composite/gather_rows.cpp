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

at::Tensor gather_pages(const at::Tensor& pages, const at::Tensor& table, int64_t total) {
  const int64_t heads = pages.size(1), size = pages.size(2), dim = pages.size(3);
  const int64_t count = divide_up(total, size);
  const auto rows = at::empty({heads, count, size, dim}, pages.options());
  auto of_pages = rows.transpose(0, 1);
  at::index_select_out(of_pages, pages, 0, table.narrow(0, 0, count));
  return rows.view({1, heads, count * size, dim}).narrow(2, 0, total);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("gather_rows", &gather_rows);
}

}  // namespace h2o_prefill::composite
