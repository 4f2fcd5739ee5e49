#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

AttentionResult intra_chunk_attention(const AttentionArguments& x, int64_t chunk_size) {
  const int64_t length = x.length();
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::empty({x.key.size(0), x.key.size(1), length}, lse.options());
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    const int64_t rows = std::min(chunk_size, length - begin);
    const auto chunk = [&](const at::Tensor& t) { return t.narrow(2, begin, rows); };
    const auto attended =
        attend(chunk(x.query), chunk(x.key), chunk(x.value), causal_mask(rows, out), x.scale());
    chunk(out).copy_(attended.out);
    chunk(lse).copy_(attended.lse);
    chunk(colsum).copy_(attended.colsum);
  }
  return {out, lse, colsum};
}

AttentionResult memory_attention(const AttentionArguments& x, const at::Tensor& indices) {
  const int64_t width = indices.size(2);
  // No more positions than keys: the rest of each list is absent.
  const auto members = indices.narrow(2, 0, std::min(width, x.total()));
  const auto present = (members >= 0).unsqueeze(2).unsqueeze(2);
  const auto attended = attend(x.query, composite::gather_rows(x.key, members),
                               composite::gather_rows(x.value, members), present, x.scale());
  auto out = x.empty_out();
  out.copy_(attended.out);
  const int64_t absent = width - members.size(2);
  return {out, attended.lse.contiguous(),
          at::constant_pad_nd(attended.colsum, {0, absent}).contiguous()};
}

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b) {
  check_merge_states(out_a, lse_a, out_b, lse_b);
  const auto type = accumulate_type(out_a);
  const auto merged = merge({out_a.to(type), lse_a, {}}, {out_b.to(type), lse_b, {}});
  auto out = empty_heads(out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3), out_a);
  out.copy_(merged.out);
  return {out, merged.lse.contiguous()};
}

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
    lse.narrow(2, row, count).copy_(attended.lse);
  }
  if (x.sinks) lse = at::logaddexp(lse, x.sinks->to(lse.scalar_type()).unsqueeze(-1));
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
  m.impl("intra_chunk_attention", &intra_chunk_attention_entry<&intra_chunk_attention>);
  m.impl("memory_attention", &memory_attention_entry<&memory_attention>);
  m.impl("merge_states", &merge_states);
  m.impl("dense_attention", &dense_attention_entry<&dense_attention>);
  m.impl("sliding_window_attention", &sliding_window_attention_entry<&sliding_window_attention>);
}

}  // namespace h2o_prefill::composite
