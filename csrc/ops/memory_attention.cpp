#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention(const at::Tensor& q,
                                                                const at::Tensor& k,
                                                                const at::Tensor& v,
                                                                const at::Tensor& indices,
                                                                std::optional<double> scale) {
  static const auto op = find_op<decltype(memory_attention)>("h2o_prefill::memory_attention");
  return op.call(q, k, v, indices, scale);
}

H2O_SCHEMA(
    "memory_attention(Tensor q, Tensor k, Tensor v, Tensor indices, float? scale=None) "
    "-> (Tensor out, Tensor lse, Tensor colsum)")

}  // namespace h2o_prefill
