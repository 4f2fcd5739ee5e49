#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor> sliding_window_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap) {
  static const auto op =
      find_op<decltype(sliding_window_attention)>("h2o_prefill::sliding_window_attention");
  return op.call(q, k, v, window, scale, sinks, softcap);
}

H2O_SCHEMA(
    "sliding_window_attention(Tensor q, Tensor k, Tensor v, int window, float? scale=None, "
    "Tensor? sinks=None, float softcap=0.0) -> (Tensor, Tensor)")

}  // namespace h2o_prefill
