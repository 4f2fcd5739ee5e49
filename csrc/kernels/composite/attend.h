// Softmax attention as plain matrix products, with the statistics that the method needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace h2o_prefill::composite {

// How logits are treated, apart from `scale`.
struct LogitOptions {
  std::optional<at::Tensor> sinks = {};  // [Hq]
  double softcap = 0.0;
  bool reduce_max = false;  // column sums of a group: the maximum over its heads instead of the sum
};

// Results over disjoint key sets are fused before the sinks join them, which count once.
struct Attended {
  at::Tensor out;     // [B, Hq, T, Dv], accumulation type; without the sinks
  at::Tensor lse;     // [B, Hq, T], without the sinks
  at::Tensor colsum;  // [B, Hkv, N]
};

// Attends with q [B, Hq, T, D] to k [B, Hkv, N, D], v [B, Hkv, N, Dv]. visible: bool, broadcast to
// [B, Hkv, 1, T, N]; absent: all keys. Without a visible key a row gives 0 and lse -inf.
// Column sums have the sinks in the denominators.
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const std::optional<at::Tensor>& visible, double scale,
                const LogitOptions& options = {});

// Fuses two results over disjoint key sets; colsum comes from `a`.
Attended merge(const Attended& a, const Attended& b);

// The output, and lse, with the sinks in the denominators.
at::Tensor out_with_sinks(const Attended& attended, const LogitOptions& options);
at::Tensor lse_with_sinks(const Attended& attended, const LogitOptions& options);

// bool [rows, rows], true where key <= query.
at::Tensor causal_mask(int64_t rows, const at::Tensor& like);

}  // namespace h2o_prefill::composite
