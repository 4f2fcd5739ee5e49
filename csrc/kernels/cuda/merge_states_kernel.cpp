#include "kernels/cuda/merge_states.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor> merge_states_cuda(const at::Tensor& out_a_argument,
                                                     const at::Tensor& lse_a_argument,
                                                     const at::Tensor& out_b_argument,
                                                     const at::Tensor& lse_b_argument) {
  check_merge_states(out_a_argument, lse_a_argument, out_b_argument, lse_b_argument);
  if (out_a_argument.scalar_type() == at::kDouble) {
    return composite::merge_states(out_a_argument, lse_a_argument, out_b_argument, lse_b_argument);
  }
  const c10::cuda::CUDAGuard guard(out_a_argument.device());
  const auto out_a = with_contiguous_rows(out_a_argument);
  const auto out_b = with_contiguous_rows(out_b_argument);
  const auto lse_a = lse_a_argument.contiguous();
  const auto lse_b = lse_b_argument.contiguous();
  auto out = empty_heads(out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3), out_a);
  auto lse = at::empty(lse_a.sizes(), lse_a.options());
  if (lse.numel() == 0) return {out, lse};
  C10_CUDA_CHECK(launch_merge_states(
      {heads_view(out_a), heads_view(out_b), heads_view(out), lse_a.const_data_ptr<float>(),
       lse_b.const_data_ptr<float>(), lse.mutable_data_ptr<float>()},
      c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) { m.impl("merge_states", &merge_states_cuda); }

}  // namespace
}  // namespace h2o_prefill
