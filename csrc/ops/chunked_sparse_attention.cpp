#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    int64_t chunk_size, int64_t local_window, int64_t heavy_budget, int64_t sink_tokens,
    int64_t dense_tail, std::string_view gqa_reduce, int64_t recall_block,
    std::optional<double> scale) {
  static const auto op =
      find_op<decltype(chunked_sparse_attention)>("h2o_prefill::chunked_sparse_attention");
  return op.call(q, k, v, scores, memory, recall_offsets, recall_positions, recall_visible_from,
                 last_chunk_begin, chunk_size, local_window, heavy_budget, sink_tokens, dense_tail,
                 gqa_reduce, recall_block, scale);
}

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  m.set_python_module("h2o_prefill._meta");
  m.def(
      "chunked_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor? scores, Tensor? memory, "
      "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, int "
      "last_chunk_begin, "
      "int chunk_size, int local_window, int heavy_budget, int sink_tokens=0, int dense_tail=0, "
      "str gqa_reduce=\"sum\", int recall_block=128, float? scale=None) "
      "-> (Tensor out, Tensor scores, Tensor memory)");
}

}  // namespace h2o_prefill
