// Scratch memory of a chunk in the backward pass of linear attention, and the layout of packed
// states.
#pragma once

#include "kernels/cpu/linear_chunk_backward.h"
#include "kernels/cpu/linear_rows.h"

namespace h2o_prefill::H2O_ISA {

// Row-major, columns padded to whole panels.
struct Matrix {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};

H2O_INLINE int64_t row_floats(int64_t columns) { return score_stride(columns); }
H2O_INLINE Matrix rows_of(float* data, int64_t columns) { return {data, row_floats(columns)}; }

H2O_INLINE int64_t matrix_floats(int64_t key_dim, int64_t value_dim) {
  return value_dim * pad_to(key_dim, kPanel);
}

H2O_INLINE int64_t state_floats(int64_t key_dim, int64_t value_dim) {
  return whole_lines(matrix_floats(key_dim, value_dim) + pad_to(key_dim, kPanel));
}

// The normaliser, which is stored after the matrix of a state.
H2O_INLINE float* normalizer_of(float* state, const LinearBackwardArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}
H2O_INLINE const float* normalizer_of(const float* state, const LinearBackwardArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}

// Query heads are multiplied in blocks of at most this many rows, but at least one head.
constexpr int64_t kBlockRows = 128;

H2O_INLINE int64_t heads_of_block(int64_t rows) {
  return rows < kBlockRows ? kBlockRows / rows : 1;
}

// Scratch memory of one chunk. A block stacks the rows of several query heads.
struct Scratch {
  Matrix keys;         // [rows, key dim] features
  Matrix values;       // [rows, value dim]
  Matrix query;        // [block rows, key dim] features
  Matrix grad_out;     // [block rows, value dim]
  Matrix grad_query;   // [rows, key dim]
  Matrix grad_key;     // [rows, key dim]
  Matrix grad_value;   // [rows, value dim]
  Matrix scores;       // [block rows, rows]: query times key
  Matrix products;     // [block rows, rows]: output gradient times value
  Matrix decays;       // [rows, rows]: decay from key to row; above the diagonal any finite number
  float* keys_packed;  // [panel][key dim][key of the panel], 0 after the last key
  float* values_packed;
  float* state;       // the state before the chunk, in the direction of the walk
  float* transposed;  // the same as [panel over value dim][key dim][dim of the panel]
  float* from_start;  // [rows]: decay from the start of the chunk to the row
  float* to_end;      // [rows]: decay from the key to the end of the chunk
  float* steps;       // [rows]: log decay from each key to the current row
  float* row;         // [key dim or value dim]
  int64_t floats;     // size of the whole scratch

  // first: null to compute only `floats`.
  Scratch(float* first, int64_t key_dim, int64_t value_dim, int64_t rows) {
    const int64_t padded = pad_to(rows, kPanel), block = heads_of_block(rows) * rows;
    floats = 0;
    const auto take = [&](int64_t count) {
      float* const part = first ? first + floats : nullptr;
      floats += whole_lines(count);
      return part;
    };
    const auto take_rows = [&](int64_t count, int64_t columns) {
      return rows_of(take(count * row_floats(columns)), columns);
    };
    keys = take_rows(rows, key_dim);
    values = take_rows(rows, value_dim);
    query = take_rows(block, key_dim);
    grad_out = take_rows(block, value_dim);
    grad_query = take_rows(rows, key_dim);
    grad_key = take_rows(rows, key_dim);
    grad_value = take_rows(rows, value_dim);
    scores = take_rows(block, rows);
    products = take_rows(block, rows);
    decays = take_rows(rows, rows);
    keys_packed = take(padded * key_dim);
    values_packed = take(padded * value_dim);
    state = take(state_floats(key_dim, value_dim));
    transposed = take(key_dim * pad_to(value_dim, kPanel));
    from_start = take(padded);
    to_end = take(padded);
    steps = take(padded);
    row = take(pad_to(key_dim > value_dim ? key_dim : value_dim, kLanes));
  }
};

H2O_INLINE int64_t scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows) {
  return Scratch(nullptr, key_dim, value_dim, rows).floats;
}

// The rows of head i of a block.
H2O_INLINE Matrix of_head(const LinearBackwardArgs& args, const Matrix& block, int64_t i) {
  return {block.row(i * args.rows), block.stride};
}

}  // namespace h2o_prefill::H2O_ISA
