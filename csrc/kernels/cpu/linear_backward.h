// The backward pass of causal linear attention on CPUs.
#pragma once

#include "common/linear_attention_request.h"

namespace h2o_prefill {

// Gradients of a causal request of float32, bfloat16 or float16 with at least one token. The chunk
// size of the request is ignored. Besides the results it allocates the states of pieces
// (linear_pieces.h), twice, and two floats for each row of a normalised output.
LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& request,
                                                        const LinearAttentionGradients& gradients);

}  // namespace h2o_prefill
