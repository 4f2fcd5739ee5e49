#include "common/prefill_entries.h"
#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, PrefillState> prefill_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PrefillState& state,
    int64_t layer, std::string_view settings, const RecallLists& recall,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap) {
  static const auto op = find_op<decltype(prefill_attention_entry<nullptr, nullptr>)>(
      "h2o_prefill::prefill_attention");
  auto [out, scores, memory, errors] = op.call(
      q, k, v, if_defined(state.scores), if_defined(state.memory), if_defined(recall.offsets),
      if_defined(recall.positions), if_defined(recall.visible_from), state.last_chunk_begin, layer,
      settings, scale, sinks, softcap, if_defined(state.errors));
  const auto config = read_settings(settings);
  const int64_t length = q.size(2);
  const int64_t past = k.size(2) - length;
  return {std::move(out),
          {.scores = std::move(scores),
           .memory = std::move(memory),
           .last_chunk_begin = length > 0 && config->is_sparse(layer, past, length)
                                   ? config->last_chunk_begin(past, length)
                                   : state.last_chunk_begin,
           .errors = std::move(errors)}};
}

at::Tensor prefill_attention_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              PrefillBuffers& buffers, const at::Tensor& position, int64_t layer,
                              std::string_view settings, const RecallLists& recall,
                              std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                              double softcap, std::optional<int64_t> window,
                              const Checkpoints& checkpoints) {
  static const auto op =
      find_op<decltype(prefill_attention_in_place_entry<nullptr, nullptr, nullptr>)>(
          "h2o_prefill::prefill_attention_");
  return op.call(q, k, v, buffers.key, buffers.value, buffers.scores, buffers.memory, position,
                 if_defined(recall.offsets), if_defined(recall.positions),
                 if_defined(recall.visible_from), layer, settings, scale, sinks, softcap,
                 if_defined(buffers.errors), window, if_defined(checkpoints.memory),
                 if_defined(checkpoints.scores), if_defined(checkpoints.errors));
}

H2O_SCHEMA(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor? scores, Tensor? memory, "
    "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, "
    "SymInt last_chunk_begin, int layer, str settings, float? scale=None, Tensor? sinks=None, "
    "float softcap=0.0, Tensor? errors=None) -> "
    "(Tensor out, Tensor scores, Tensor memory, Tensor errors)")
H2O_SCHEMA(
    "prefill_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) cache_key, "
    "Tensor(b!) cache_value, Tensor(c!) scores, Tensor(d!) memory, Tensor position, "
    "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, int layer, "
    "str settings, float? scale=None, Tensor? sinks=None, float softcap=0.0, "
    "Tensor(e!)? errors=None, int? window=None, Tensor(f!)? checkpoint_memory=None, "
    "Tensor(g!)? checkpoint_scores=None, Tensor(h!)? checkpoint_errors=None) -> Tensor")

}  // namespace h2o_prefill
