#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
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

}  // namespace

at::Tensor dense_attention(const at::Tensor& q_argument, const at::Tensor& k, const at::Tensor& v,
                           std::optional<double> scale_argument) {
  check_dense_attention(q_argument, k, v, scale_argument);
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

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("dense_attention", &dense_attention);
}

}  // namespace h2o_prefill::composite
