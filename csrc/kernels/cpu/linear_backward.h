// The backward pass of causal linear attention on CPUs.
#pragma once

#include "common/linear_attention_request.h"

namespace h2o_prefill {

// Of a causal request of float32, bfloat16 or float16 with at least one token. Chunks have a size
// of their own: that of the request decides nothing. Beside the results it takes the
// states of pieces (linear_pieces.h), twice, and two floats for each row of a normalised output.
LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& request,
                                                        const LinearAttentionGradients& gradients);

}  // namespace h2o_prefill
