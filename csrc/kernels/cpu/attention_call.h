// Tensors of an attention op in the form that its passes take.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/tensors.h"
#include "kernels/cpu/attend_chunk.h"

namespace h2o_prefill {

// What all passes of a call share. Tensors have contiguous rows; lse [B, Hq, T]; sinks as of
// float_sinks().
inline AttendChunkArgs attention_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& out, float* lse, double scale,
                                      const at::Tensor& sinks = {}, double softcap = 0.0) {
  return {.query = heads_view(q),
          .key = heads_view(k),
          .value = heads_view(v),
          .out = heads_view(out),
          .earlier = {},
          .lse = lse,
          .rows = {},
          .scale = static_cast<float>(scale),
          .sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr,
          .softcap = static_cast<float>(bounded_softcap(softcap)),
          .reduce_max = false,
          .sets = {},
          .num_sets = 0,
          .recall = {}};
}

}  // namespace h2o_prefill
