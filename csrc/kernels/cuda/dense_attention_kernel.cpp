#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softmax.h>
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

// Parts of the keys before the rows of one prompt, with which few rows fill the GPU; 0: they fill
// it, or the keys are few.
int64_t parts_of_past(const at::Tensor& q, const at::Tensor& k) {
  constexpr int64_t kLeastKeys = 512;  // of a part
  if (q.size(0) > 1) return 0;
  const int64_t blocks = q.size(1) * ((q.size(2) + kLimitRows - 1) / kLimitRows);
  const int64_t parts = std::min(kManyBlocks / blocks, (k.size(2) - q.size(2)) / kLeastKeys);
  return parts > 1 ? parts : 0;
}

// Dense attention of one prompt's rows to `parts` equal parts of the keys before them, which are
// the batch rows of one launch, then to the keys that are left; merged.
at::Tensor attend_in_parts(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           int64_t parts, double scale, const at::Tensor& sinks, double softcap) {
  const int64_t rows = q.size(2);
  const int64_t keys = (k.size(2) - rows) / parts;
  const auto floats = q.options().dtype(at::kFloat);
  const auto out = empty_heads(parts + 1, q.size(1), rows, v.size(3), q);
  const auto lse = at::empty({parts + 1, q.size(1), rows}, floats);
  const auto in_parts = [&](const at::Tensor& t) {
    return t.narrow(2, 0, parts * keys).unflatten(2, {parts, keys}).squeeze(0).transpose(0, 1);
  };
  const auto room = (rows + kLimitRows - 1) / kLimitRows * kLimitRows;
  const auto limits = at::full({room}, keys, q.options().dtype(at::kInt));
  const AttentionStream stream(q);
  stream.attend(limited_pass(
      attention_call(q.expand({parts, -1, -1, -1}), in_parts(k), in_parts(v),
                     out.narrow(0, 0, parts), lse.narrow(0, 0, parts), scale, {}, softcap),
      limits.const_data_ptr<int32_t>()));
  const auto call = attention_call(q, k, v, out.narrow(0, parts, 1), lse.narrow(0, parts, 1), scale,
                                   sinks, softcap);
  auto rest = dense_pass(call, call.rows);
  rest.causal.begin = parts * keys;
  rest.causal.count -= parts * keys;
  stream.attend(rest);
  auto merged = empty_heads(1, q.size(1), rows, v.size(3), q);
  return merged.copy_(out.mul(at::softmax(lse, 0).unsqueeze(-1)).sum(0, /*keepdim=*/true));
}

}  // namespace

at::Tensor dense_attention_cuda(const at::Tensor& q_argument, const at::Tensor& k_argument,
                                const at::Tensor& v_argument, std::optional<double> scale,
                                const std::optional<at::Tensor>& sinks_argument, double softcap) {
  check_dense_attention(q_argument, k_argument, v_argument, scale, sinks_argument, softcap);
  const bool is_plain = !sinks_argument && softcap == 0.0;
  if (!has_attention_kernel(q_argument, v_argument) || q_argument.numel() == 0 ||
      (is_plain && pytorch_has_kernel(q_argument, k_argument, v_argument))) {
    return composite::dense_attention(q_argument, k_argument, v_argument, scale, sinks_argument,
                                      softcap);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  const auto sinks = float_sinks(sinks_argument);
  const double softmax_scale = scale_or_default(scale, q.size(3));
  if (const int64_t parts = parts_of_past(q, k); parts > 0) {
    return attend_in_parts(q, k, v, parts, softmax_scale, sinks, softcap);
  }
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  const auto call =
      attention_call(q, k, v, out, /*lse=*/at::Tensor(), softmax_scale, sinks, softcap);
  AttentionStream(q).attend(dense_pass(call, call.rows));
  return out;
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    int64_t window, std::optional<double> scale, const std::optional<at::Tensor>& sinks_argument,
    double softcap) {
  check_sliding_window_attention(q_argument, k_argument, v_argument, window, scale, sinks_argument,
                                 softcap);
  if (!has_attention_kernel(q_argument, v_argument) || q_argument.numel() == 0) {
    return composite::sliding_window_attention(q_argument, k_argument, v_argument, window, scale,
                                               sinks_argument, softcap);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  const auto sinks = float_sinks(sinks_argument);
  auto out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const auto call =
      attention_call(q, k, v, out, lse, scale_or_default(scale, q.size(3)), sinks, softcap);
  AttentionStream(q).attend(dense_pass(call, call.rows, std::min(window, k.size(2))));
  return {out, lse};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("dense_attention", &dense_attention_cuda);
  m.impl("sliding_window_attention", &sliding_window_attention_cuda);
}

}  // namespace h2o_prefill
