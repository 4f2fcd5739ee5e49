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
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, Autograd, m) {
  for (const char* name :
       {"intra_chunk_attention", "memory_attention", "merge_states", "select_memory", "gather_rows",
        "dense_attention", "chunked_sparse_attention", "lexical_recall"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&inference_only>());
  }
}

}  // namespace h2o_prefill
