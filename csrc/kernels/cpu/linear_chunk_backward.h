// The inner part of the backward pass of linear attention on CPUs: one chunk of one KV head and of
// the query heads that share it.
//
// It is compiled once per instruction set (linear_chunk_backward.cpp), like attend_rows.h.
#pragma once

#include <cstdint>

#include "kernels/feature_map.h"
#include "kernels/params.h"

namespace h2o_prefill {

// Rows of one chunk: the first of the first head, and strides in elements.
struct LinearRows {
  void* data;
  int64_t stride;
  int64_t head_stride;
};

// A state S and its adjoint, the sum of all contributions of results to its gradient, have one
// packed layout: transposed, Dv x D as tiles read it, then D values for the normaliser.
struct LinearBackwardArgs {
  DType dtype;  // of all rows
  FeatureMap feature_map;
  bool normalize;
  float scale;  // of outputs that are not normalised
  int64_t rows;
  // Distance in rows to the chunk that is processed next, and its number of rows, 0 after the last
  // chunk. Its rows are prefetched.
  int64_t next;
  int64_t next_rows;
  int64_t key_dim;
  int64_t value_dim;
  LinearRows key;
  LinearRows value;
  const float* log_decay;  // one a row; null: none
  int64_t decay_stride;
  bool past_caches;  // gradients are too large to stay in a cache
  int64_t heads;     // query heads
  LinearRows query;
  LinearRows grad_out;
  LinearRows grad_query;
  LinearRows grad_key;
  LinearRows grad_value;
  // For normalised outputs: 1 / weight of each row (0 for a weight of 0) and the gradient of the
  // weight. The forward walk writes them, the backward walk reads them.
  float* inverse;
  float* grad_weight;
  int64_t weight_head_stride;
  // One per row: sum over query heads of query . grad_query, minus key . grad_key. The forward walk
  // writes the first term, the backward walk subtracts the second. Null: not computed.
  float* flow;
  // The state or adjoint before the chunk, in the direction of the walk, is exp(start_log_decay) *
  // start + sum. The chunk decays `sum` and adds its own contribution.
  const float* start;  // null: 0
  float start_log_decay;
  float* sum;
  bool sum_is_zero;  // `sum` is uninitialised and counts as zero
  float* scratch;    // scratch_floats(...) floats, of one thread
};

struct LinearBackwardKernels {
  // The first four functions return the sum of the chunk's log decays. This one computes only the
  // state after the chunk.
  float (*add_state)(const LinearBackwardArgs&);
  // Computes only the adjoint before the chunk.
  float (*add_adjoint)(const LinearBackwardArgs&);
  // Walks from the first token to the last: gradients of queries, and the state.
  float (*walk_forward)(const LinearBackwardArgs&);
  // Walks from the last token to the first: gradients of keys and values, and the adjoint.
  float (*walk_backward)(const LinearBackwardArgs&);
  // state [D, Dv], normalizer [D]. Null input: zero; null output: not written.
  void (*pack_state)(const float* state, const float* normalizer, int64_t key_dim,
                     int64_t value_dim, float* packed);
  void (*unpack_state)(const float* packed, int64_t key_dim, int64_t value_dim, float* state,
                       float* normalizer);
  // Dot product of two packed states.
  float (*dot_states)(const float* a, const float* b, int64_t floats);
  int64_t (*state_floats)(int64_t key_dim, int64_t value_dim);
  int64_t (*scratch_floats)(int64_t key_dim, int64_t value_dim, int64_t rows);
};

}  // namespace h2o_prefill
