#include "ops/dispatch.h"

namespace h2o_prefill {

RecallLists lexical_recall(const at::Tensor& token_ids, int64_t begin, int64_t chunk_size,
                           int64_t block, int64_t max_matches, int64_t max_suffix, int64_t span,
                           int64_t max_count) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  static const auto op = find_op<Signature>("h2o_prefill::lexical_recall");
  auto [offsets, positions, visible_from] =
      op.call(token_ids, begin, chunk_size, block, max_matches, max_suffix, span, max_count);
  return {std::move(offsets), std::move(positions), std::move(visible_from)};
}

RecallLists lexical_recall(const at::Tensor& token_ids, int64_t begin,
                           const PrefillConfig& config) {
  return lexical_recall(token_ids, begin, config.chunk_size, config.recall_block, config.recall,
                        config.recall_suffix, config.recall_span, config.recall_max_count);
}

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  m.set_python_module("h2o_prefill._meta");
  m.def(
      "lexical_recall(Tensor token_ids, int begin, int chunk_size, int block, int max_matches, "
      "int max_suffix=3, int span=2, int max_count=16) -> "
      "(Tensor offsets, Tensor positions, Tensor visible_from)");
}

}  // namespace h2o_prefill
