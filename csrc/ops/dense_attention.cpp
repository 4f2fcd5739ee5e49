#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                           double softcap) {
  static const auto op = find_op<decltype(dense_attention)>("h2o_prefill::dense_attention");
  return op.call(q, k, v, scale, sinks, softcap);
}

H2O_SCHEMA(
    "dense_attention(Tensor q, Tensor k, Tensor v, float? scale=None, Tensor? sinks=None, "
    "float softcap=0.0) -> Tensor")

}  // namespace h2o_prefill
