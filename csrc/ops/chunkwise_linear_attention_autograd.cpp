// The backward pass of chunkwise_linear_attention: the saved tensors, and the op that computes it.
#include <torch/csrc/autograd/custom_function.h>

#include "common/linear_attention_request.h"
#include "common/rules.h"
#include "ops/dispatch.h"

namespace h2o_prefill {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The arguments after the tensors; they have no gradient.
constexpr size_t kTensors = 6;
constexpr size_t kArguments = 11;

class Differentiable : public torch::autograd::Function<Differentiable> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& log_decay,
                               const OptionalTensor& initial_state,
                               const OptionalTensor& initial_normalizer,
                               const std::string& feature_map, int64_t chunk_size, bool causal,
                               bool normalize, std::optional<double> scale) {
    static const auto op =
        find_op<LinearAttentionSignature>("h2o_prefill::chunkwise_linear_attention");
    const auto [out, state, normalizer] = [&] {
      const at::AutoDispatchBelowADInplaceOrView below;
      return op.call(q, k, v, log_decay, initial_state, initial_normalizer, feature_map, chunk_size,
                     causal, normalize, scale);
    }();
    context->save_for_backward({q, k, v, or_undefined(log_decay), or_undefined(initial_state),
                                or_undefined(initial_normalizer)});
    auto& options = context->saved_data;
    options["feature_map"] = feature_map;
    options["chunk_size"] = chunk_size;
    options["causal"] = causal;
    options["normalize"] = normalize;
    options["scale"] = scale;
    return {out, state, normalizer};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "h2o_prefill::chunkwise_linear_attention has no second derivative: call backward() "
                "or torch.autograd.grad() without create_graph");
    static const auto op = find_op<LinearAttentionBackwardSignature>(
        "h2o_prefill::chunkwise_linear_attention_backward");
    const auto saved = context->get_saved_variables();
    auto& options = context->saved_data;
    const auto [q, k, v, log_decay, state, normalizer] =
        op.call(saved[0], saved[1], saved[2], if_defined(saved[3]), if_defined(saved[4]),
                if_defined(saved[5]), gradients[0], gradients[1], gradients[2],
                options["feature_map"].toStringView(), options["chunk_size"].toInt(),
                options["causal"].toBool(), options["normalize"].toBool(),
                options["scale"].toOptional<double>());
    variable_list result{q, k, v, log_decay, state, normalizer};
    for (size_t i = 3; i < kTensors; ++i) {
      if (!saved[i].defined()) result[i] = at::Tensor();
    }
    result.resize(kArguments);
    return result;
  }
};

LinearAttentionResult differentiable(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const OptionalTensor& log_decay,
                                     const OptionalTensor& initial_state,
                                     const OptionalTensor& initial_normalizer,
                                     std::string_view feature_map, int64_t chunk_size, bool causal,
                                     bool normalize, std::optional<double> scale) {
  // Autograd refuses undefined tensors too, but its message does not name the argument.
  check_dims("q", q, 4);
  check_dims("k", k, 4);
  check_dims("v", v, 4);
  const auto results =
      Differentiable::apply(q, k, v, log_decay, initial_state, initial_normalizer,
                            std::string(feature_map), chunk_size, causal, normalize, scale);
  return {results[0], results[1], results[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, Autograd, m) {
  m.impl("chunkwise_linear_attention", &differentiable);
}

}  // namespace h2o_prefill
