// Softmax attention as plain matrix products, with the statistics that the method needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace h2o_prefill::composite {

struct Attended {
  at::Tensor out;     // [B, Hq, T, Dv], accumulation type
  at::Tensor lse;     // [B, Hq, T]
  at::Tensor colsum;  // [B, Hkv, N]
};

// Attends with q [B, Hq, T, D] to k [B, Hkv, N, D], v [B, Hkv, N, Dv]. visible: bool, broadcast to
// [B, Hkv, 1, T, N]; absent: all keys. Without a visible key a row gives 0 and lse -inf.
// reduce_max: column sums of a group are their maximum over its heads instead of their sum.
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const std::optional<at::Tensor>& visible, double scale, bool reduce_max = false);

// Fuses two results over disjoint key sets; colsum stays that of `a`.
Attended merge(const Attended& a, const Attended& b);

// bool [rows, rows], true where key <= query.
at::Tensor causal_mask(int64_t rows, const at::Tensor& like);

}  // namespace h2o_prefill::composite
