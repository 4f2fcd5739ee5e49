#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

at::Tensor gather_pages(const at::Tensor& pages, const at::Tensor& table, int64_t total) {
  const int64_t heads = pages.size(1), size = pages.size(2), dim = pages.size(3);
  const int64_t count = divide_up(total, size);
  const auto rows = at::empty({heads, count, size, dim}, pages.options());
  auto of_pages = rows.transpose(0, 1);
  at::index_select_out(of_pages, pages, 0, table.narrow(0, 0, count));
  return rows.view({1, heads, count * size, dim}).narrow(2, 0, total);
}

}  // namespace h2o_prefill::composite
