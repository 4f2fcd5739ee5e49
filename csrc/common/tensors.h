// Views of tensors for kernels, and the layout of results.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/params.h"

namespace h2o_prefill {

// The type of sums: float32 for 16-bit and float32 tensors, float64 for float64.
at::ScalarType accumulate_type(const at::Tensor& t);

// The tensor itself if its last dimension is contiguous, else a contiguous copy.
at::Tensor with_contiguous_rows(const at::Tensor& t);

// Describes a [B, H, T, D] tensor of float32, bfloat16 or float16 with contiguous rows.
HeadsView heads_view(const at::Tensor& t);

// Requests huge pages for a large CPU tensor that is about to be written in full: one page fault
// for 2 MiB instead of 512, which take 3 times as long. Has no effect where the system has none.
void advise_huge_pages(const at::Tensor& t);

// Uninitialised [B, H, T, D] whose transpose(1, 2) is contiguous: the layout that models reshape
// without a copy.
at::Tensor empty_heads(int64_t batch, int64_t heads, int64_t length, int64_t dim,
                       const at::Tensor& like);

// LayerState::errors of a layer with keys [B, Hkv, ...] before any is measured.
at::Tensor no_errors(const at::Tensor& key);

inline double scale_or_default(std::optional<double> scale, int64_t head_dim) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

// A softcap that gives the same logits up to rounding: beyond these bounds all are capped, or none.
inline double bounded_softcap(double softcap) {
  return softcap == 0.0 ? 0.0 : std::clamp(softcap, 1e-30, 1e30);
}

}  // namespace h2o_prefill
