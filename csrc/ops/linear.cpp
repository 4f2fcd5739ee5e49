#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                  const std::optional<at::Tensor>& bias, int64_t outputs) {
  static const auto op = find_op<decltype(linear)>("h2o_prefill::linear");
  return op.call(x, packed, scales, bias, outputs);
}

H2O_SCHEMA("linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int outputs) -> Tensor")

}  // namespace h2o_prefill
