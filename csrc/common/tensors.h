// Views of tensors for kernels, and the layout of results.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "kernels/params.h"

namespace h2o_prefill {

// An optional argument of a schema, and the tensor in it, undefined if there is none.
using OptionalTensor = std::optional<at::Tensor>;
inline at::Tensor or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }

// The type of sums: float32 for 16-bit and float32 tensors, float64 for float64.
at::ScalarType accumulate_type(const at::Tensor& t);

// The tensor itself if its last dimension is contiguous, else a contiguous copy.
at::Tensor with_contiguous_rows(const at::Tensor& t);

// Describes a [B, H, T, D] tensor of float32, bfloat16 or float16 with contiguous rows.
HeadsView heads_view(const at::Tensor& t);

// Uninitialised [B, H, T, D] whose transpose(1, 2) is contiguous: the layout that models reshape
// without a copy.
at::Tensor empty_heads(int64_t batch, int64_t heads, int64_t length, int64_t dim,
                       const at::Tensor& like);

// LayerState::errors of a layer with keys [B, Hkv, ...] before any is measured.
at::Tensor no_errors(const at::Tensor& key);

// A softcap that gives the same logits up to rounding: beyond these bounds all are capped, or none.
inline double bounded_softcap(double softcap) {
  return softcap == 0.0 ? 0.0 : std::clamp(softcap, 1e-30, 1e30);
}

}  // namespace h2o_prefill
