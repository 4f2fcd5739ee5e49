#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

namespace {

// The same logits with a scale above 0: PyTorch's attention multiplies the -inf of masked keys by
// any other, which gives NaN or +inf.
std::tuple<at::Tensor, std::optional<double>> with_positive_scale(const at::Tensor& q,
                                                                  std::optional<double> scale) {
  if (!scale || *scale > 0) return {q, scale};
  if (*scale < 0) return {q.neg(), -*scale};
  return {at::zeros_like(q), 1.0};
}

// Attention with sinks, a softcap, a window or lse, which PyTorch's does not support. Some rows at
// a time, so that logits stay small, and for a window as many as it has keys.
std::tuple<at::Tensor, at::Tensor> attend_by_rows(const AttentionArguments& x, int64_t window) {
  constexpr int64_t kMostLogits = 1 << 26;
  constexpr int64_t kFewestRows = 64;
  const at::Tensor& q = x.query;
  const LogitOptions options{.sinks = x.sinks, .softcap = x.softcap};
  const int64_t rows = x.length();
  const int64_t past = x.past();
  const int64_t fitting = kMostLogits / std::max<int64_t>(1, q.size(0) * q.size(1) * x.total());
  const int64_t step = std::clamp<int64_t>(fitting, 1, std::max(window, kFewestRows));
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    const int64_t end = past + row + count;
    const int64_t begin = std::max<int64_t>(0, past + row - window + 1);
    const int64_t first = past + row - begin;  // key of the first row, in [begin, end)
    const auto visible = at::ones({count, end - begin}, q.options().dtype(at::kBool))
                             .tril(first)
                             .triu(std::max(first - window + 1, -count));
    const auto keys = [&](const at::Tensor& t) { return t.narrow(2, begin, end - begin); };
    const auto attended =
        attend(q.narrow(2, row, count), keys(x.key), keys(x.value), visible, x.scale(), options);
    out.narrow(2, row, count).copy_(out_with_sinks(attended, options));
    lse.narrow(2, row, count).copy_(lse_with_sinks(attended, options));
  }
  return {out, lse};
}

}  // namespace

at::Tensor dense_attention(const AttentionArguments& x) {
  if (!x.is_plain()) return std::get<0>(attend_by_rows(x, /*window=*/x.total()));
  const auto [q, scale] = with_positive_scale(x.query, x.softmax_scale);
  const int64_t rows = x.length();
  const int64_t keys = x.total();
  // PyTorch's attention is faster without a mask, and counts `causal` from the first key.
  std::optional<at::Tensor> mask;
  if (rows > 1 && rows < keys)
    mask = at::ones({rows, keys}, q.options().dtype(at::kBool)).tril(keys - rows);
  const auto out = at::scaled_dot_product_attention(q, x.key, x.value, mask, 0.0,
                                                    /*is_causal=*/rows == keys, scale,
                                                    q.size(1) != x.key.size(1));
  // The layout of empty_heads(), which most of PyTorch's kernels have too.
  return out.transpose(1, 2).contiguous().transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention(const AttentionArguments& x,
                                                            int64_t window) {
  return attend_by_rows(x, window);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("dense_attention", &dense_attention_entry<&dense_attention>);
  m.impl("sliding_window_attention", &sliding_window_attention_entry<&sliding_window_attention>);
}

}  // namespace h2o_prefill::composite
