// The search runs on the CPU, once for all layers: its data structures are a poor fit for a GPU,
// and the tokens of a prompt are few bytes.
#include <torch/library.h>

#include "common/prefill_request.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> lexical_recall_cuda(
    const at::Tensor& token_ids, int64_t begin, std::string_view settings,
    const std::optional<at::Tensor>& token_text) {
  const RecallLists lists = h2o_prefill::lexical_recall(
      token_ids.cpu(), begin, *read_settings(settings), token_text.value_or(at::Tensor()));
  const auto to_device = [&](const at::Tensor& list) { return list.to(token_ids.device()); };
  return {to_device(lists.offsets), to_device(lists.positions), to_device(lists.visible_from)};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) { m.impl("lexical_recall", &lexical_recall_cuda); }

}  // namespace
}  // namespace h2o_prefill
