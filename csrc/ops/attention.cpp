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

at::Tensor dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                           double softcap) {
  static const auto op = find_op<decltype(dense_attention)>("h2o_prefill::dense_attention");
  return op.call(q, k, v, scale, sinks, softcap);
}

H2O_SCHEMA(
    "dense_attention(Tensor q, Tensor k, Tensor v, float? scale=None, Tensor? sinks=None, "
    "float softcap=0.0) -> Tensor")

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

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b) {
  static const auto op = find_op<decltype(merge_states)>("h2o_prefill::merge_states");
  return op.call(out_a, lse_a, out_b, lse_b);
}

H2O_SCHEMA(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor "
    "lse)")

}  // namespace h2o_prefill
