// No op has a gradient. An input that requires one, while gradients are on, is an error rather than
// a silent cut.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

namespace h2o_prefill {
namespace {

bool requires_grad(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().requires_grad();
}

void inference_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    const auto num_arguments = op.schema().arguments().size();
    for (auto value = stack->end() - static_cast<std::ptrdiff_t>(num_arguments);
         value != stack->end(); ++value) {
      TORCH_CHECK(
          !requires_grad(*value), op.schema().name(),
          " is for inference and has no gradient, got an input that requires one: call it under "
          "torch.no_grad() or torch.inference_mode(), or detach the input");
    }
  }
  // What an op changes in place has a new version, as after PyTorch's own ops.
  const auto& arguments = op.schema().arguments();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && alias->isWrite() && !first[i].toTensor().is_inference()) {
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
        "accumulate_scores_", "gather_rows", "dense_attention", "chunked_sparse_attention",
        "prefill_attention", "prefill_attention_", "advance_position_", "lexical_recall"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&inference_only>());
  }
}

}  // namespace h2o_prefill
