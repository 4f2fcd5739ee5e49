#include <ATen/ATen.h>

#include <algorithm>

#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

void measure_errors(const PrefillRequest& request, const at::Tensor& out, const RowRange& rows) {
  const int64_t count = request.measured_rows().count_of(rows);
  const int64_t end = rows.position() + rows.count;
  const auto positions = at::arange(end, request.query.options().dtype(at::kLong));
  std::vector<at::Tensor> queries, sparse, visible;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows.begin + error_row(rows, count, i);
    queries.push_back(request.query.narrow(2, row, 1));
    sparse.push_back(out.narrow(2, row, 1));
    visible.push_back(positions <= rows.past + row);
  }
  const LogitOptions options{.sinks = request.sinks, .softcap = request.softcap};
  const auto exact = out_with_sinks(
      attend(at::cat(queries, 2), request.key.narrow(2, 0, end), request.value.narrow(2, 0, end),
             at::stack(visible), request.scale(), options),
      options);
  const auto missed = (at::cat(sparse, 2).to(exact.scalar_type()) - exact).square().sum(-1);
  const auto whole = exact.square().sum(-1);
  const auto error = at::where(whole > 0, missed / whole, at::zeros_like(whole))
                         .view({request.key.size(0), request.key.size(1), -1})
                         .mean(-1);
  record_errors(request.errors, error, request.widening());
}

}  // namespace h2o_prefill::composite
