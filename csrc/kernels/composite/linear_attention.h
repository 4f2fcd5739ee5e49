// Linear attention in one or both directions and its backward pass, built on one recurrence.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/linear_attention_request.h"

namespace h2o_prefill::composite {

struct Scanned {
  at::Tensor out;    // [B, Hq, T, Dv]
  at::Tensor state;  // [B, Hkv, D, Dv], after the last token
};

// The recurrence alone: S_i = exp(g_i) S_{i-1} + k_i^T v_i, out_i = q_i S_i. All of the
// accumulation type: q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], log_decay [B, Hkv, T]
// and state [B, Hkv, D, Dv], which may be undefined. reverse: from the last token to the
// first.
using LinearScan = Scanned (*)(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& log_decay, const at::Tensor& state,
                               int64_t chunk_size, bool reverse);

// In plain ATen calls.
Scanned linear_scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& log_decay, const at::Tensor& state, int64_t chunk_size,
                    bool reverse);

// The operator and its backward pass over such a recurrence. Memory is linear in the length: states
// are recomputed, not stored.
LinearAttentionResult linear_attention(const LinearAttentionRequest& request, LinearScan scan);
LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& request,
                                                        const LinearAttentionGradients& gradients,
                                                        LinearScan scan);

}  // namespace h2o_prefill::composite
