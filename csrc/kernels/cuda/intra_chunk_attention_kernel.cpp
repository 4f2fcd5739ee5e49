#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention_cuda(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    int64_t chunk_size, std::optional<double> scale) {
  check_intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size, scale);
  if (!has_attention_kernel(q_argument, v_argument)) {
    return composite::intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size, scale);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  const int64_t length = q.size(2);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto colsum = at::empty({k.size(0), k.size(1), length}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  const auto call = attention_call(q, k, v, out, lse, scale_or_default(scale, q.size(3)));
  AttentionStream stream(q);
  const AttendForwardParams pass = chunk_pass(call, chunk_size);
  stream.attend(pass);
  stream.sum_columns(column_sums(pass, call.lse, colsum.mutable_data_ptr<float>(), length));
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_cuda);
}

}  // namespace
}  // namespace h2o_prefill
