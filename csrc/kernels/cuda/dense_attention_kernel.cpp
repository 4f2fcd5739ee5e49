#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/dense_attention.h"

namespace h2o_prefill {
namespace {

// For one row, or as many rows as keys, PyTorch's attention needs no mask and chooses among kernels
// that are tuned for the GPU (cuDNN, FlashAttention). With unequal head dims it has no such kernel.
bool pytorch_has_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return (q.size(2) == 1 || q.size(2) == k.size(2)) && q.size(3) == v.size(3);
}

}  // namespace

at::Tensor dense_attention_cuda(const at::Tensor& q_argument, const at::Tensor& k_argument,
                                const at::Tensor& v_argument, std::optional<double> scale,
                                const std::optional<at::Tensor>& sinks, double softcap) {
  check_dense_attention(q_argument, k_argument, v_argument, scale, sinks, softcap);
  if (!has_attention_kernel(q_argument, v_argument) || !has_attention_kernel(sinks, softcap) ||
      q_argument.numel() == 0 || pytorch_has_kernel(q_argument, k_argument, v_argument)) {
    return composite::dense_attention(q_argument, k_argument, v_argument, scale, sinks, softcap);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  const auto call =
      attention_call(q, k, v, out, /*lse=*/at::Tensor(), scale_or_default(scale, q.size(3)));
  AttentionStream(q).attend(dense_pass(call, call.rows));
  return out;
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    int64_t window, std::optional<double> scale, const std::optional<at::Tensor>& sinks,
    double softcap) {
  check_sliding_window_attention(q_argument, k_argument, v_argument, window, scale, sinks, softcap);
  if (!has_attention_kernel(q_argument, v_argument) || !has_attention_kernel(sinks, softcap) ||
      q_argument.numel() == 0) {
    return composite::sliding_window_attention(q_argument, k_argument, v_argument, window, scale,
                                               sinks, softcap);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const auto call = attention_call(q, k, v, out, lse, scale_or_default(scale, q.size(3)));
  AttentionStream(q).attend(dense_pass(call, call.rows, std::min(window, k.size(2))));
  return {out, lse};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("dense_attention", &dense_attention_cuda);
  m.impl("sliding_window_attention", &sliding_window_attention_cuda);
}

}  // namespace h2o_prefill
