#include "common/prefill_entries.h"
#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor prefill_attention_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              PrefillBuffers& buffers, const at::Tensor& position,
                              const LayerOptions& options, const Checkpoints& checkpoints) {
  static const auto op = find_op<decltype(prefill_attention_entry<nullptr, nullptr, nullptr>)>(
      "h2o_prefill::prefill_attention_");
  return op.call(q, if_defined(k), if_defined(v), buffers.key, buffers.value, buffers.scores,
                 buffers.memory, if_defined(buffers.errors), position, options.layer,
                 options.settings, options.scale, options.sinks, options.softcap,
                 if_defined(options.recall.offsets), if_defined(options.recall.positions),
                 if_defined(options.recall.visible_from), options.window,
                 if_defined(checkpoints.memory), if_defined(checkpoints.scores),
                 if_defined(checkpoints.errors));
}

H2O_SCHEMA(
    "prefill_attention_(Tensor q, Tensor? k, Tensor? v, Tensor(a!) cache_key, "
    "Tensor(b!) cache_value, Tensor(c!) scores, Tensor(d!) memory, Tensor(e!)? errors, "
    "Tensor position, int layer, str settings, float? scale=None, Tensor? sinks=None, "
    "float softcap=0.0, Tensor? recall_offsets=None, Tensor? recall_positions=None, "
    "Tensor? recall_visible_from=None, int? window=None, Tensor(f!)? checkpoint_memory=None, "
    "Tensor(g!)? checkpoint_scores=None, Tensor(h!)? checkpoint_errors=None) -> Tensor")

}  // namespace h2o_prefill
