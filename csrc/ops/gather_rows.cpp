#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& indices) {
  static const auto op = find_op<decltype(gather_rows)>("h2o_prefill::gather_rows");
  return op.call(x, indices);
}

H2O_SCHEMA("gather_rows(Tensor x, Tensor indices) -> Tensor")

}  // namespace h2o_prefill
