// One call of chunkwise_linear_attention as every implementation receives it: checked tensors and
// settings.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "common/tensors.h"
#include "h2o_prefill/ops.h"
#include "kernels/linear_params.h"

namespace h2o_prefill {

// Throws c10::ValueError for an unknown name.
FeatureMap feature_map_named(std::string_view name);

// Gradients with respect to the results of a call. Undefined: 0.
struct LinearAttentionGradients {
  at::Tensor out;         // [B, Hq, T, Dv], of the dtype of the query
  at::Tensor state;       // [B, Hkv, D, Dv]
  at::Tensor normalizer;  // [B, Hkv, D]
};

struct LinearAttentionRequest {
  at::Tensor query;  // [B, Hq, T, D]
  at::Tensor key;    // [B, Hkv, T, D]
  at::Tensor value;  // [B, Hkv, T, Dv]
  // Of the accumulation type; undefined: none.
  at::Tensor log_decay = {};   // [Hkv] or [B, Hkv, T]
  at::Tensor state = {};       // [B, Hkv, D, Dv]
  at::Tensor normalizer = {};  // [B, Hkv, D]
  FeatureMap feature_map = FeatureMap::kIdentity;
  int64_t chunk_size = 64;
  bool causal = true;
  bool normalize = false;
  double scale = 1.0;  // not used where the output is normalised

  int64_t length() const { return query.size(2); }
  // The decay as a view [B, Hkv, T]; undefined: none.
  at::Tensor decay_by_token() const;

  // Throws c10::ValueError if an argument is wrong. The sign of decays is checked where the host
  // can read them; on other devices one above 0 makes states grow without bound.
  void check() const;
  // The same for the gradients that the backward pass receives.
  void check(const LinearAttentionGradients& gradients) const;
};

// out [B, Hq, T, Dv], state [B, Hkv, D, Dv], normaliser [B, Hkv, D or 0].
using LinearAttentionResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Gradients of q, k, v, the decay, the state and the normaliser; empty where none was given.
using LinearAttentionInputGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The request of the arguments that both schemas begin with. Throws c10::ValueError as check()
// does.
LinearAttentionRequest checked_linear_attention_request(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& log_decay,
    const OptionalTensor& initial_state, const OptionalTensor& initial_normalizer,
    std::string_view feature_map, int64_t chunk_size, bool causal, bool normalize,
    std::optional<double> scale);

// The adapters between the dispatcher and a device's implementation of the operators; the schemas
// are in ops/.
template <LinearAttentionResult (*attend)(const LinearAttentionRequest& request)>
LinearAttentionResult chunkwise_linear_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& log_decay,
    const OptionalTensor& initial_state, const OptionalTensor& initial_normalizer,
    std::string_view feature_map, int64_t chunk_size, bool causal, bool normalize,
    std::optional<double> scale) {
  const LinearAttentionRequest request =
      checked_linear_attention_request(q, k, v, log_decay, initial_state, initial_normalizer,
                                       feature_map, chunk_size, causal, normalize, scale);
  return attend(request);
}

template <LinearAttentionInputGradients (*attend_backward)(
    const LinearAttentionRequest& request, const LinearAttentionGradients& gradients)>
LinearAttentionInputGradients chunkwise_linear_attention_backward_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& log_decay,
    const OptionalTensor& initial_state, const OptionalTensor& initial_normalizer,
    const at::Tensor& grad_out, const OptionalTensor& grad_state,
    const OptionalTensor& grad_normalizer, std::string_view feature_map, int64_t chunk_size,
    bool causal, bool normalize, std::optional<double> scale) {
  const LinearAttentionRequest request =
      checked_linear_attention_request(q, k, v, log_decay, initial_state, initial_normalizer,
                                       feature_map, chunk_size, causal, normalize, scale);
  const LinearAttentionGradients gradients{grad_out, or_undefined(grad_state),
                                           or_undefined(grad_normalizer)};
  request.check(gradients);
  return attend_backward(request, gradients);
}

using LinearAttentionSignature = decltype(chunkwise_linear_attention_entry<nullptr>);
using LinearAttentionBackwardSignature =
    decltype(chunkwise_linear_attention_backward_entry<nullptr>);

}  // namespace h2o_prefill
