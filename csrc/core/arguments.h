// Argument rules that the classes share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace h2o_prefill {

inline void check_at_least(const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, name, " must be >= ", least, ", got ", value);
}

inline void check_layer(int64_t layer, int64_t num_layers) {
  TORCH_CHECK_VALUE(layer >= 0 && layer < num_layers, "layer must be in [0, ", num_layers,
                    "), got ", layer);
}

inline void check_dims(const char* name, const at::Tensor& t, int64_t dims) {
  TORCH_CHECK_VALUE(t.defined() && t.dim() == dims, name, " must have ", dims, " dimensions, got ",
                    t.defined() ? t.dim() : 0);
}

// dtype and device of another tensor, which `of` describes.
inline void check_same_kind(const char* name, const at::Tensor& t, const at::Tensor& other,
                            const char* of) {
  TORCH_CHECK_VALUE(t.scalar_type() == other.scalar_type() && t.device() == other.device(), name,
                    " must have dtype and device of ", of, " (", other.scalar_type(), " on ",
                    other.device(), "), got ", t.scalar_type(), " on ", t.device());
}

// What is stored has no gradient, and must not look as if it had.
inline void check_inference_only(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && t.requires_grad()), name,
                    " must not require a gradient while gradients are on: sparse prefill is for "
                    "inference, call it under "
                    "torch.no_grad() or torch.inference_mode(), or detach the input");
}

}  // namespace h2o_prefill
