#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor> pack_linear(const at::Tensor& weight, std::string_view format) {
  static const auto op = find_op<decltype(pack_linear)>("h2o_prefill::pack_linear");
  return op.call(weight, format);
}

H2O_SCHEMA("pack_linear(Tensor weight, str format) -> (Tensor packed, Tensor scales)")

}  // namespace h2o_prefill
