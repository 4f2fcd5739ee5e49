// The operator merge_states, for other CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor> merge_states_cpu(const at::Tensor& out_a,
                                                    const at::Tensor& lse_a,
                                                    const at::Tensor& out_b,
                                                    const at::Tensor& lse_b);

}  // namespace h2o_prefill
