// Linear attention in one or both directions in plain ATen calls, and its backward pass by
// autograd.
#pragma once

#include "common/linear_attention_request.h"

namespace h2o_prefill::composite {

// Both directions of a call are causal calls of the operator, by the fastest implementation that
// the device has.
LinearAttentionResult linear_attention(const LinearAttentionRequest& request);
LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& request,
                                                        const LinearAttentionGradients& gradients);

}  // namespace h2o_prefill::composite
