// The inner part of linear attention on CPUs: one chunk of one KV head and of the query heads that
// share it.
//
// It is compiled once per instruction set (linear_chunk.cpp), like attend_rows.h.
#pragma once

#include <cstdint>

#include "kernels/linear_params.h"

namespace h2o_prefill {

// Rows of one chunk: the first of the first head, and strides in elements.
struct LinearRows {
  void* data;
  int64_t stride;
  int64_t head_stride;

  LinearRows(const HeadsView& view, int64_t batch, int64_t head, int64_t row)
      : data(view.row(batch, head, row)), stride(view.stride_row), head_stride(view.stride_head) {}
};

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
  LinearRows key;
  LinearRows value;
  const float* log_decay;  // one a row; null: none
  int64_t decay_stride;
  // Query heads; 0: only the state is computed.
  int64_t heads;
  LinearRows query;
  LinearRows out;
  // Rows of the next call on this thread, which has the same strides and heads; they are
  // prefetched.
  int64_t next_rows = 0;
  const void* next_key = nullptr;
  const void* next_value = nullptr;
  const void* next_query = nullptr;
  bool streams_out;  // the output is too large to be read again from a cache
  // The state before the chunk is exp(start_log_decay) * start + sum. The chunk decays `sum` and
  // adds its own contribution.
  const float* start = nullptr;  // null: 0
  float start_log_decay = 0.0F;
  float* sum = nullptr;
  bool sum_is_zero = true;  // `sum` is uninitialised and counts as zero
  float* scratch;           // scratch_floats(...) floats, of one thread
};

// States of a KV head in the caller's layout, float32 and contiguous. Null input: zero; null
// output: not computed.
struct LinearStates {
  const float* state;       // [D, Dv]
  const float* normalizer;  // [D]
  float* last_state;
  float* last_normalizer;
};

struct LinearKernels {
  // Returns the sum of the chunk's log decays.
  float (*linear_chunk)(const LinearChunkArgs&);
  // sum += exp(log_decay) * start for whole packed states.
  void (*add_earlier)(const float* start, float log_decay, int64_t floats, float* sum);
  // state [D, Dv], normalizer [D]. Null input: zero; null output: not written.
  void (*pack_state)(const float* state, const float* normalizer, int64_t key_dim,
                     int64_t value_dim, float* packed);
  void (*unpack_state)(const float* packed, int64_t key_dim, int64_t value_dim, float* state,
                       float* normalizer);
  int64_t (*state_floats)(int64_t key_dim, int64_t value_dim);
  int64_t (*scratch_floats)(int64_t key_dim, int64_t value_dim, int64_t rows);
  // Processes all rows of a short call token by token, from the states before them to the states
  // after them. Of the fields from `start` on only `scratch` is used: token_scratch_floats(...)
  // floats.
  void (*linear_tokens)(const LinearChunkArgs&, const LinearStates&);
  int64_t (*token_scratch_floats)(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads);
};

}  // namespace h2o_prefill
