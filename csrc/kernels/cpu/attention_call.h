// Arguments of an attention op in the form that its passes take.
#pragma once

#include "common/attention.h"
#include "kernels/cpu/attend_chunk.h"

namespace h2o_prefill {

// Common to all passes of a call. x: with contiguous rows (see with_rows()).
inline AttendChunkArgs attention_call(const AttentionArguments& x, const at::Tensor& out,
                                      float* lse) {
  return {.query = heads_view(x.query),
          .key = heads_view(x.key),
          .value = heads_view(x.value),
          .out = heads_view(out),
          .earlier = {},
          .lse = lse,
          .rows = {},
          .scale = static_cast<float>(x.scale()),
          .sinks = x.sink_data(),
          .softcap = static_cast<float>(bounded_softcap(x.softcap)),
          .reduce_max = false,
          .sets = {},
          .num_sets = 0,
          .recall = {}};
}

}  // namespace h2o_prefill
