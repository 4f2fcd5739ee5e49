#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention_cuda(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    const at::Tensor& indices_argument, std::optional<double> scale) {
  check_memory_attention(q_argument, k_argument, v_argument, indices_argument, scale);
  if (!has_attention_kernel(q_argument, v_argument)) {
    return composite::memory_attention(q_argument, k_argument, v_argument, indices_argument, scale);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t length = q.size(2);
  const int64_t width = indices.size(2);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse, at::zeros({k.size(0), k.size(1), width}, lse.options())};
  auto colsum = at::empty({k.size(0), k.size(1), width}, lse.options());

  const auto call = attention_call(q, k, v, out, lse, scale_or_default(scale, q.size(3)));
  AttentionStream stream(q);
  const AttendForwardParams pass = memory_pass(
      call, call.rows, {.positions = indices.const_data_ptr<int32_t>(), .width = width});
  stream.attend(pass);
  if (width > 0) {
    stream.sum_columns(column_sums(pass, call.lse, colsum.mutable_data_ptr<float>(), width));
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) { m.impl("memory_attention", &memory_attention_cuda); }

}  // namespace
}  // namespace h2o_prefill
