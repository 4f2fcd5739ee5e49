// Arguments of the kernel of causal linear attention.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace h2o_prefill {

// What is applied to queries and keys.
enum class FeatureMap : int32_t {
  kIdentity,
  kRelu,
  kEluPlusOne,  // x + 1 above 0, exp(x) elsewhere
};

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
};

}  // namespace h2o_prefill
