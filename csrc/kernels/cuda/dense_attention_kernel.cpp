#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softmax.h>
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

// Parts of the keys before the rows of one prompt, with which few rows fill the GPU; 0: they fill
// it, or the keys are few.
int64_t parts_of_past(const AttentionArguments& x) {
  constexpr int64_t kLeastKeys = 512;  // of a part
  if (x.query.size(0) > 1) return 0;
  const int64_t blocks = x.query.size(1) * divide_up(x.length(), kLimitRows);
  const int64_t parts = std::min(kManyBlocks / blocks, x.past() / kLeastKeys);
  return parts > 1 ? parts : 0;
}

// Dense attention of one prompt's rows to `parts` equal parts of the keys before them, which are
// the batch rows of one launch, then to the keys that are left; merged.
at::Tensor attend_in_parts(const AttentionArguments& x, int64_t parts) {
  const at::Tensor& q = x.query;
  const int64_t rows = x.length();
  const int64_t keys = x.past() / parts;
  const auto floats = q.options().dtype(at::kFloat);
  const auto out = empty_heads(parts + 1, q.size(1), rows, x.value.size(3), q);
  const auto lse = at::empty({parts + 1, q.size(1), rows}, floats);
  const auto in_parts = [&](const at::Tensor& t) {
    return t.narrow(2, 0, parts * keys).unflatten(2, {parts, keys}).squeeze(0).transpose(0, 1);
  };
  const auto room = round_up(rows, kLimitRows);
  const auto limits = at::full({room}, keys, q.options().dtype(at::kInt));
  const AttentionStream stream(q);
  AttentionArguments batch{q.expand({parts, -1, -1, -1}), in_parts(x.key), in_parts(x.value),
                           x.softmax_scale};
  batch.softcap = x.softcap;  // sinks count once, with the rest
  stream.attend(
      limited_pass(attention_call(batch, out.narrow(0, 0, parts), lse.narrow(0, 0, parts)),
                   limits.const_data_ptr<int32_t>()));
  const auto call = attention_call(x, out.narrow(0, parts, 1), lse.narrow(0, parts, 1));
  auto rest = dense_pass(call, call.rows);
  rest.causal.begin = parts * keys;
  rest.causal.count -= parts * keys;
  stream.attend(rest);
  auto merged = x.empty_out();
  return merged.copy_(out.mul(at::softmax(lse, 0).unsqueeze(-1)).sum(0, /*keepdim=*/true));
}

}  // namespace

at::Tensor dense_attention_cuda(const AttentionArguments& given) {
  if (!has_attention_kernel(given) || given.is_empty() ||
      (given.is_plain() && pytorch_has_kernel(given))) {
    return composite::dense_attention(given);
  }
  const c10::cuda::CUDAGuard guard(given.query.device());
  const AttentionArguments x = given.with_rows(&with_aligned_rows);
  if (const int64_t parts = parts_of_past(x); parts > 0) return attend_in_parts(x, parts);
  auto out = x.empty_out();
  const auto call = attention_call(x, out, /*lse=*/{});
  AttentionStream(out).attend(dense_pass(call, call.rows));
  return out;
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cuda(const AttentionArguments& given,
                                                                 int64_t window) {
  if (!has_attention_kernel(given) || given.is_empty()) {
    return composite::sliding_window_attention(given, window);
  }
  const c10::cuda::CUDAGuard guard(given.query.device());
  const AttentionArguments x = given.with_rows(&with_aligned_rows);
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
