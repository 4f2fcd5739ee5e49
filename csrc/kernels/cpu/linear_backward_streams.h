// Prefetching of rows in the backward pass of linear attention.
#pragma once

#include "kernels/cpu/linear_chunk_backward.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {

H2O_INLINE int64_t panels(int64_t dim) { return pad_to(dim, kPanel) / kPanel; }

// Rows that a chunk prefetches while it computes.
struct Streams {
  RowStream keys;  // of the next chunk
  RowStream values;
  RowStream queries;  // of the next head
  RowStream grad_out;

  void advance() {
    keys.advance();
    values.advance();
    queries.advance();
    grad_out.advance();
  }
};

// Lower bound on the panels that are multiplied for one head.
H2O_INLINE int64_t head_steps(const LinearBackwardArgs& args) {
  return panels(args.rows) + panels(args.key_dim);
}

H2O_INLINE RowStream stream_of(const LinearBackwardArgs& args, const LinearRows& of, int64_t head,
                               int64_t row, int64_t rows, int64_t dim, int64_t steps) {
  const int64_t offset = head * of.head_stride + row * of.stride;
  return {static_cast<const char*>(of.data) + offset * size_of(args.dtype),
          args.dtype,
          of.stride,
          rows,
          dim,
          steps};
}

H2O_INLINE Streams next_chunk(const LinearBackwardArgs& args) {
  const int64_t steps = args.heads * head_steps(args);
  Streams streams;
  streams.keys = stream_of(args, args.key, 0, args.next, args.next_rows, args.key_dim, steps);
  streams.values = stream_of(args, args.value, 0, args.next, args.next_rows, args.value_dim, steps);
  return streams;
}

// Asks for the rows of the head that comes when `count` heads have been multiplied from `head` on,
// the next chunk's from its first head on, within so many panels.
H2O_INLINE void ask_for_head(const LinearBackwardArgs& args, int64_t head, int64_t count,
                             int64_t steps, Streams& streams) {
  const bool in_chunk = head + count < args.heads;
  const int64_t row = in_chunk ? 0 : args.next, rows = in_chunk ? args.rows : args.next_rows;
  const int64_t next = in_chunk ? head + count : head % count;
  streams.queries = stream_of(args, args.query, next, row, rows, args.key_dim, steps);
  streams.grad_out = stream_of(args, args.grad_out, next, row, rows, args.value_dim, steps);
}

}  // namespace h2o_prefill::H2O_ISA
