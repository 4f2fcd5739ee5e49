#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/dense_attention.h"

namespace h2o_prefill {
namespace {

// For one row, or as many rows as keys, PyTorch's attention needs no mask and chooses among kernels
// that are tuned for the GPU (cuDNN, FlashAttention). With unequal head dims it has no such kernel.
bool pytorch_has_kernel(const AttentionArguments& x) {
  return (x.length() == 1 || x.past() == 0) && x.query.size(3) == x.value.size(3);
}

}  // namespace

at::Tensor dense_attention_cuda(const AttentionArguments& arguments) {
  if (!has_attention_kernel(arguments) || arguments.is_empty() ||
      (arguments.is_plain() && pytorch_has_kernel(arguments))) {
    return composite::dense_attention(arguments);
  }
  const c10::cuda::CUDAGuard guard(arguments.query.device());
  const AttentionArguments x = arguments.with_rows(&with_aligned_rows);
  // Few rows fill the GPU by parts of their keys.
  if (const int64_t parts = parts_of_keys(x, /*least_keys=*/512); parts > 1) {
    const int64_t room = round_up(x.length(), kLimitRows);
    const auto ints = x.query.options().dtype(at::kInt);
    const auto limits = at::arange(x.past() + 1, x.past() + 1 + room, ints).clamp_max_(x.total());
    return attend_in_parts(x, limits, parts);
  }
  auto out = x.empty_out();
  const auto call = attention_call(x, out, /*lse=*/{});
  AttentionStream(out).attend(dense_pass(call, call.rows));
  return out;
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(
    const AttentionArguments& arguments, int64_t window) {
  if (!has_attention_kernel(arguments) || arguments.is_empty()) {
    return composite::sliding_window_attention(arguments, window);
  }
  const c10::cuda::CUDAGuard guard(arguments.query.device());
  const AttentionArguments x = arguments.with_rows(&with_aligned_rows);
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  const auto call = attention_call(x, out, lse);
  AttentionStream(out).attend(dense_pass(call, call.rows, std::min(window, x.total())));
  return {out, lse};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("dense_attention", &dense_attention_entry<&dense_attention_cuda>);
  m.impl("sliding_window_attention",
         &sliding_window_attention_entry<&sliding_window_attention_cuda>);
}

}  // namespace h2o_prefill
