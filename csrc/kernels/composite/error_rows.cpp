#include <ATen/ATen.h>

#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

void measure_errors(const PrefillRequest& request, const at::Tensor& out, const RowRange& rows) {
  const int64_t end = rows.position() + rows.count;
  const auto positions = at::arange(end, request.query.options().dtype(at::kLong));
  const auto measured = measured_rows(request.settings, rows.position(), rows.count);
  const auto row = at::tensor(measured, positions.options()) + rows.begin;
  const LogitOptions options{.sinks = request.sinks, .softcap = request.softcap};
  const auto exact =
      out_with_sinks(attend(request.query.index_select(2, row), request.key.narrow(2, 0, end),
                            request.value.narrow(2, 0, end),
                            positions <= (row + rows.past).unsqueeze(1), request.scale(), options),
                     options);
  const auto missed = (out.index_select(2, row).to(exact.scalar_type()) - exact).square().sum(-1);
  const auto whole = exact.square().sum(-1);
  const auto error = at::where(whole > 0, missed / whole, at::zeros_like(whole))
                         .view({request.key.size(0), request.key.size(1), -1})
                         .mean(-1);
  record_errors(request.errors, error, request.widening());
}

}  // namespace h2o_prefill::composite
