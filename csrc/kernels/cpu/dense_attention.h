// The operator dense_attention, for other CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace h2o_prefill {

at::Tensor dense_attention_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                               double softcap);

}  // namespace h2o_prefill
