// The inner part of linear attention on CPUs: one chunk of one KV head and of the query heads that
// share it.
//
// It is compiled once per instruction set (linear_chunk.cpp), like attend_rows.h.
#pragma once

#include <cstdint>

#include "kernels/feature_map.h"
#include "kernels/params.h"

namespace h2o_prefill {

// States are packed: D x Dv as tiles read it, then the D sums of keys of the normaliser.
struct LinearChunkArgs {
  DType dtype;  // of queries, keys and values
  DType out_dtype;
  FeatureMap feature_map;
  bool normalize;
  float scale;  // of outputs that are not normalised
  int64_t rows;
  int64_t key_dim;
  int64_t value_dim;
  // First row of each; strides in elements.
  const void* key;
  int64_t key_stride;
  const void* value;
  int64_t value_stride;
  const float* log_decay;  // one a row; null: none
  int64_t decay_stride;
  // Query heads; 0: the state alone is computed.
  int64_t heads;
  const void* query;
  int64_t query_stride;
  int64_t query_head_stride;
  void* out;
  int64_t out_stride;
  int64_t out_head_stride;
  // Rows of the call that comes next on this thread, of the same strides and heads: asked for
  // before they are needed.
  int64_t next_rows;
  const void* next_key;
  const void* next_value;
  const void* next_query;
  bool streams_out;  // the output is too large to be read again from a cache
  // The state before the chunk is exp(start_log_decay) start + sum. The chunk decays `sum` and adds
  // what it brings.
  const float* start;  // null: 0
  float start_log_decay;
  float* sum;
  bool sum_is_zero;  // nothing has been written there
  float* scratch;    // scratch_floats(...) floats, of one thread
};

// States of a KV head as callers have them, float32 and contiguous; null: 0, or not wanted.
struct LinearStates {
  const float* state;       // [D, Dv]
  const float* normalizer;  // [D]
  float* last_state;
  float* last_normalizer;
};

struct LinearKernels {
  // Returns the sum of the chunk's log decays.
  float (*linear_chunk)(const LinearChunkArgs&);
  // sum += exp(log_decay) start, whole packed states.
  void (*add_earlier)(const float* start, float log_decay, int64_t floats, float* sum);
  // state [D, Dv], normalizer [D]; null: 0, or not wanted.
  void (*pack_state)(const float* state, const float* normalizer, int64_t key_dim,
                     int64_t value_dim, float* packed);
  void (*unpack_state)(const float* packed, int64_t key_dim, int64_t value_dim, float* state,
                       float* normalizer);
  int64_t (*state_floats)(int64_t key_dim, int64_t value_dim);
  int64_t (*scratch_floats)(int64_t key_dim, int64_t value_dim, int64_t rows);
  // All rows of a call, from the states before them to those after them, for few rows: `start` and
  // what follows it are not looked at, but for `scratch`: token_scratch_floats(...) floats.
  void (*linear_tokens)(const LinearChunkArgs&, const LinearStates&);
  int64_t (*token_scratch_floats)(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads);
};

}  // namespace h2o_prefill
