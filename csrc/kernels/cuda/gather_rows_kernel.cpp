#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/cuda/gather_rows.h"

namespace h2o_prefill {
namespace {

at::Tensor gather_rows_cuda(const at::Tensor& x_argument, const at::Tensor& indices_argument) {
  check_gather_rows(x_argument, indices_argument);
  const c10::cuda::CUDAGuard guard(x_argument.device());
  const auto x = with_contiguous_rows(x_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t size = x.element_size();
  auto y = at::empty({x.size(0), x.size(1), indices.size(2), x.size(3)}, x.options());
  if (y.numel() == 0) return y;
  // The stride of a dimension of one entry may be anything, but must not spoil the alignment.
  const auto stride = [&](int64_t d) { return x.size(d) > 1 ? x.stride(d) * size : 0; };
  C10_CUDA_CHECK(launch_gather_rows({x.const_data_ptr(), stride(0), stride(1), stride(2), x.size(2),
                                     indices.const_data_ptr<int32_t>(), y.mutable_data_ptr(),
                                     x.size(0), x.size(1), indices.size(2), x.size(3) * size},
                                    c10::cuda::getCurrentCUDAStream()));
  return y;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) { m.impl("gather_rows", &gather_rows_cuda); }

}  // namespace
}  // namespace h2o_prefill
