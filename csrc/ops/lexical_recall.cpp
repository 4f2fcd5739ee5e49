#include "ops/dispatch.h"

namespace h2o_prefill {

RecallLists lexical_recall(const at::Tensor& token_ids, int64_t begin, const PrefillConfig& config,
                           const at::Tensor& token_text) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, int64_t, std::string_view, const std::optional<at::Tensor>&);
  static const auto op = find_op<Signature>("h2o_prefill::lexical_recall");
  auto [offsets, positions, visible_from] =
      op.call(token_ids, begin, config.to_string(), if_defined(token_text));
  return {std::move(offsets), std::move(positions), std::move(visible_from)};
}

H2O_SCHEMA(
    "lexical_recall(Tensor token_ids, int begin, str settings, Tensor? token_text=None) -> "
    "(Tensor offsets, Tensor positions, Tensor visible_from)")

}  // namespace h2o_prefill
