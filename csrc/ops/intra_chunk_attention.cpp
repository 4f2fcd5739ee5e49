#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention(const at::Tensor& q,
                                                                     const at::Tensor& k,
                                                                     const at::Tensor& v,
                                                                     int64_t chunk_size,
                                                                     std::optional<double> scale) {
  static const auto op =
      find_op<decltype(intra_chunk_attention)>("h2o_prefill::intra_chunk_attention");
  return op.call(q, k, v, chunk_size, scale);
}

H2O_SCHEMA(
    "intra_chunk_attention(Tensor q, Tensor k, Tensor v, int chunk_size, float? scale=None) "
    "-> (Tensor out, Tensor lse, Tensor colsum)")

}  // namespace h2o_prefill
