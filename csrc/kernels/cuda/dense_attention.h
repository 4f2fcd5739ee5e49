// The operators dense_attention and sliding_window_attention, for other CUDA kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace h2o_prefill {

at::Tensor dense_attention_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                                double softcap);

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap);

}  // namespace h2o_prefill
