// Causal linear attention on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/feature_map.h"
#include "kernels/params.h"

namespace h2o_prefill {

// S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i, out_i = scale phi(q_i) S_i, or phi(q_i) S_i divided by
// phi(q_i) . z_i with z_i = exp(g_i) z_{i-1} + phi(k_i), and 0 where that is 0.
//
// bfloat16 and float16: D and Dv multiples of 8 up to 128, rows that begin at multiples of 16
// bytes. phi(q), phi(k), decayed values and the state are rounded to the dtype where they are
// multiplied, all sums and what becomes of the state are float32.
struct LinearAttentionParams {
  HeadsView query;         // [B, Hq, T, D]
  HeadsView key;           // [B, Hkv, T, D]
  HeadsView value;         // [B, Hkv, T, Dv]
  HeadsView out;           // [B, Hq, T, Dv], dtype of the query
  const float* log_decay;  // g, [B, Hkv, T]; null: 0
  int64_t decay_stride_batch;
  int64_t decay_stride_head;
  int64_t decay_stride_row;
  // float32, contiguous, before the first token and after the last one; null: 0.
  const float* state;       // [B, Hkv, D, Dv]
  const float* normalizer;  // [B, Hkv, D]
  float* last_state;
  float* last_normalizer;  // null unless normalize
  FeatureMap feature_map;
  bool normalize;
  float scale;
  float* workspace;  // linear_attention_workspace_floats(), aligned to 16 bytes
};

// Whether there is a kernel for this dtype and these head dims.
bool has_linear_attention(DType dtype, int64_t dim, int64_t value_dim);

int64_t linear_attention_workspace_floats(const LinearAttentionParams& params);

// Asynchronous on `stream`; allocates nothing. Results depend on the arguments alone, to the bit.
cudaError_t launch_linear_attention(const LinearAttentionParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
