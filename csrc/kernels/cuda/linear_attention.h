// Causal linear attention on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/linear_params.h"

namespace h2o_prefill {

// Whether there is a kernel for this dtype and these head dims.
bool has_linear_attention(DType dtype, int64_t dim, int64_t value_dim);

int64_t linear_attention_workspace_floats(const LinearAttentionParams& params);

// S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i, out_i = scale phi(q_i) S_i, or phi(q_i) S_i divided by
// phi(q_i) . z_i with z_i = exp(g_i) z_{i-1} + phi(k_i), and 0 where that is 0.
//
// bfloat16 and float16: D and Dv multiples of 8 up to 128, rows that begin at multiples of 16
// bytes. phi(q), phi(k), decayed values and the state are rounded to the dtype where they are
// multiplied, all sums and what becomes of the state are float32.
//
// Asynchronous on `stream`; allocates nothing. Results depend on the arguments alone, to the bit.
cudaError_t launch_linear_attention(const LinearAttentionParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
