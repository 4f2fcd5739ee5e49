#include "common/prefill_entries.h"
#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, PrefillState> chunked_sparse_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PrefillState& state,
    const PrefillConfig& settings, const RecallLists& recall, std::optional<double> scale,
    const std::optional<at::Tensor>& sinks, double softcap) {
  static const auto op = find_op<decltype(chunked_sparse_attention_entry<nullptr, nullptr>)>(
      "h2o_prefill::chunked_sparse_attention");
  auto [out, scores, memory, errors] = op.call(
      q, k, v, if_defined(state.scores), if_defined(state.memory), if_defined(recall.offsets),
      if_defined(recall.positions), if_defined(recall.visible_from), state.last_chunk_begin,
      settings.to_string(), scale, sinks, softcap, if_defined(state.errors));
  const int64_t length = q.size(2);
  return {std::move(out),
          {.scores = std::move(scores),
           .memory = std::move(memory),
           .last_chunk_begin = length == 0 ? state.last_chunk_begin
                                           : settings.last_chunk_begin(k.size(2) - length, length),
           .errors = std::move(errors)}};
}

H2O_SCHEMA(
    "chunked_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor? scores, Tensor? memory, "
    "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, "
    "int last_chunk_begin, str settings, float? scale=None, Tensor? sinks=None, "
    "float softcap=0.0, Tensor? errors=None) -> "
    "(Tensor out, Tensor scores, Tensor memory, Tensor errors)")

}  // namespace h2o_prefill
