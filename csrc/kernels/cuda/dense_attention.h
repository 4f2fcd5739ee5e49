// Exact attention, for other CUDA kernels.
#pragma once

#include "common/attention.h"

namespace h2o_prefill {

at::Tensor dense_attention_cuda(const AttentionArguments& x);
std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(const AttentionArguments& x,
                                                                 int64_t window);

}  // namespace h2o_prefill
