#include "ops/dispatch.h"

namespace h2o_prefill {

RecallLists recall_at_position(const at::Tensor& token_ids, const at::Tensor& position,
                               int64_t num_tokens, std::string_view settings,
                               const at::Tensor& token_text) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, int64_t, std::string_view,
      const std::optional<at::Tensor>&);
  static const auto op = find_op<Signature>("h2o_prefill::recall_at_position");
  auto [offsets, positions, visible_from] =
      op.call(token_ids, position, num_tokens, settings, if_defined(token_text));
  return {std::move(offsets), std::move(positions), std::move(visible_from)};
}

H2O_SCHEMA(
    "recall_at_position(Tensor token_ids, Tensor position, SymInt num_tokens, str settings, "
    "Tensor? token_text=None) -> (Tensor offsets, Tensor positions, Tensor visible_from)")

}  // namespace h2o_prefill
