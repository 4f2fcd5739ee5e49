// Only chunkwise_linear_attention has a backward pass. For all other ops, an input that requires a
// gradient while gradients are enabled is an error rather than silently detached, and so is an
// input with a tangent of forward-mode differentiation.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/library.h>

namespace h2o_prefill {
namespace {

void inference_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  const bool gradients = at::GradMode::is_enabled();
  const bool tangents = c10::AutogradState::get_tls_state().get_fw_grad_mode();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!first[i].isTensor() || !first[i].toTensor().defined()) continue;
    const at::Tensor& tensor = first[i].toTensor();
    TORCH_CHECK(!(gradients && tensor.requires_grad()), op.schema().name(),
                " is for inference and has no gradient, got an input that requires one: call it "
                "under torch.no_grad() or torch.inference_mode(), or detach the input");
    TORCH_CHECK(!(tangents && tensor._fw_grad(/*level=*/0).defined()), op.schema().name(),
                " is for inference and has no forward-mode gradient, got an input with a tangent: "
                "take torch.autograd.forward_ad.unpack_dual(input).primal");
  }
  // Arguments changed in place get a new version, as from PyTorch's own ops.
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool is_written = alias && alias->isWrite() && first[i].isTensor();
    if (is_written && !first[i].toTensor().is_inference()) {
      first[i].toTensor().unsafeGetTensorImpl()->bump_version();
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, Autograd, m) {
  for (const char* name :
       {"intra_chunk_attention", "memory_attention", "merge_states", "select_memory",
        "accumulate_scores_", "gather_rows", "dense_attention", "sliding_window_attention",
        "chunked_sparse_attention", "prefill_attention_", "paged_sparse_attention_",
        "advance_position_", "lexical_recall", "recall_at_position",
        "chunkwise_linear_attention_backward", "pack_linear", "linear", "packed_embedding"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&inference_only>());
  }
}

}  // namespace h2o_prefill
