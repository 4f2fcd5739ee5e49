#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

namespace {

// The same logits with a scale above 0: with any other, PyTorch's attention multiplies the -inf of
// masked keys by it, which gives NaN or +inf.
std::tuple<at::Tensor, std::optional<double>> with_positive_scale(const at::Tensor& q,
                                                                  std::optional<double> scale) {
  if (!scale || *scale > 0) return {q, scale};
  if (*scale < 0) return {q.neg(), -*scale};
  return {at::zeros_like(q), 1.0};
}

// Attention with what PyTorch's does not support: sinks, a softcap, a window, and lse. Some rows at
// a time, so that logits stay small, and for a window as many as it has keys.
std::tuple<at::Tensor, at::Tensor> attend_by_rows(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, int64_t window, double scale,
                                                  const LogitOptions& options) {
  constexpr int64_t kMostLogits = 1 << 26;
  constexpr int64_t kFewestRows = 64;
  const int64_t rows = q.size(2);
  const int64_t past = k.size(2) - rows;
  const int64_t fitting = kMostLogits / std::max<int64_t>(1, q.size(0) * q.size(1) * k.size(2));
  const int64_t step = std::clamp<int64_t>(fitting, 1, std::max(window, kFewestRows));
  auto out = empty_heads(q.size(0), q.size(1), rows, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), rows}, q.options().dtype(accumulate_type(q)));
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
        attend(q.narrow(2, row, count), keys(k), keys(v), visible, scale, options);
    out.narrow(2, row, count).copy_(out_with_sinks(attended, options));
    lse.narrow(2, row, count).copy_(lse_with_sinks(attended, options));
  }
  return {out, lse};
}

}  // namespace

at::Tensor dense_attention(const at::Tensor& q_argument, const at::Tensor& k, const at::Tensor& v,
                           std::optional<double> scale_argument,
                           const std::optional<at::Tensor>& sinks, double softcap) {
  check_dense_attention(q_argument, k, v, scale_argument, sinks, softcap);
  if (sinks || softcap > 0.0) {
    return std::get<0>(attend_by_rows(q_argument, k, v, /*window=*/k.size(2),
                                      scale_or_default(scale_argument, q_argument.size(3)),
                                      {.sinks = sinks, .softcap = softcap}));
  }
  const auto [q, scale] = with_positive_scale(q_argument, scale_argument);
  const int64_t rows = q.size(2);
  const int64_t keys = k.size(2);
  // PyTorch's attention is faster without a mask, and counts `causal` from the first key.
  std::optional<at::Tensor> mask;
  if (rows > 1 && rows < keys)
    mask = at::ones({rows, keys}, q.options().dtype(at::kBool)).tril(keys - rows);
  const auto out = at::scaled_dot_product_attention(q, k, v, mask, 0.0, /*is_causal=*/rows == keys,
                                                    scale, q.size(1) != k.size(1));
  // The layout of empty_heads(), which most of PyTorch's kernels have too.
  return out.transpose(1, 2).contiguous().transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> sliding_window_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap) {
  check_sliding_window_attention(q, k, v, window, scale, sinks, softcap);
  return attend_by_rows(q, k, v, window, scale_or_default(scale, q.size(3)),
                        {.sinks = sinks, .softcap = softcap});
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("dense_attention", &dense_attention);
  m.impl("sliding_window_attention", &sliding_window_attention);
}

}  // namespace h2o_prefill::composite
