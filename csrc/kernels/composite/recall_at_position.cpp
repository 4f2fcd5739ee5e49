#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill::composite {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> recall_at_position(
    const at::Tensor& token_ids, const at::Tensor& position, int64_t num_tokens,
    std::string_view settings, const std::optional<at::Tensor>& token_text) {
  check_dims("token_ids", token_ids, 2);
  check_dtype("token_ids", token_ids, at::kLong);
  check_token_text(token_text);
  const auto config = read_settings(settings);
  const int64_t past = Position::read(position).past;
  check_call_tokens(past, num_tokens);
  const int64_t total = past + num_tokens;
  TORCH_CHECK_VALUE(total <= token_ids.size(1), "token_ids must have room for the ", past,
                    " tokens before the call and its own ", num_tokens, ", got shape ",
                    token_ids.sizes());
  if (config->recall > 0 && config->is_sparse_call(past, num_tokens)) {
    auto lists = lexical_recall(token_ids.narrow(1, 0, total), past, *config,
                                token_text.value_or(at::Tensor()));
    return {lists.offsets, lists.positions, lists.visible_from};
  }
  const int64_t blocks = divide_up(num_tokens, config->recall_block());
  const auto options = token_ids.options().dtype(at::kInt);
  return {at::zeros({token_ids.size(0) * blocks + 1}, options), at::empty({0}, options),
          at::empty({0}, options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("recall_at_position", &recall_at_position);
}

}  // namespace h2o_prefill::composite
