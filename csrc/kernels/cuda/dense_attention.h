// The operators dense_attention and sliding_window_attention, for other CUDA kernels.
#pragma once

#include "h2o_prefill/ops.h"

namespace h2o_prefill {

decltype(dense_attention) dense_attention_cuda;
decltype(sliding_window_attention) sliding_window_attention_cuda;

}  // namespace h2o_prefill
