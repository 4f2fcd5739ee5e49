// Linear attention of one chunk: Q K^T below the diagonal with its decays, times V, plus Q times
// the state before the chunk; then the state after it. Compiled once per instruction set.
//
// 16-bit inputs are widened where they are packed: a state is float32, and would lose digits as an
// operand of 16-bit products.
#include "kernels/cpu/linear_chunk.h"

#include "kernels/cpu/linear_rows.h"
#include "kernels/cpu/linear_tiles.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {
namespace {

// Rows of a query head that go through all products together, so that output is written while
// products run rather than in bursts that stall on memory.
constexpr int kQueryRows = kTileRows;

H2O_INLINE int64_t matrix_floats(int64_t key_dim, int64_t value_dim) {
  return key_dim * pad_to(value_dim, kPanel);
}

int64_t state_floats(int64_t key_dim, int64_t value_dim) {
  return whole_lines(matrix_floats(key_dim, value_dim) + key_dim);
}

// Scratch memory of one chunk.
struct Scratch {
  float* keys;         // features [panel][dim][key of the panel], 0 after the last key
  float* values;       // [panel over dim][key][dim of the panel]
  float* state;        // before the chunk, packed
  float* scaled_keys;  // keys decayed to the end of the chunk
  float* to_end;       // [rows]: decay from the key to the end of the chunk
  float* steps;        // [rows]: log decay from each key to the current row
  float* decays;       // [kQueryRows, score_stride]: exp of it
  float* from_start;   // [kQueryRows]: decay from the start of the chunk
  float* query;        // [kQueryRows, key dim] features
  float* scores;       // [kQueryRows, score_stride]
  float* acc;          // [kQueryRows, padded value dim]
  float* row;          // of the output
  int64_t floats;      // size of the whole scratch

  // first: null to compute only `floats`.
  Scratch(float* first, int64_t key_dim, int64_t value_dim, int64_t rows) {
    const int64_t padded = pad_to(rows, kPanel);
    floats = 0;
    const auto take = [&](int64_t count) {
      float* const part = first ? first + floats : nullptr;
      floats += whole_lines(count);
      return part;
    };
    keys = take(padded * key_dim);
    values = take(padded * pad_to(value_dim, kPanel));
    state = take(state_floats(key_dim, value_dim));
    scaled_keys = take(padded * key_dim);
    to_end = take(padded);
    steps = take(padded);
    decays = take(kQueryRows * score_stride(rows));
    from_start = take(pad_to(kQueryRows, kLanes));
    query = take(kQueryRows * key_dim + kLanes);
    scores = take(kQueryRows * score_stride(rows));
    acc = take(kQueryRows * pad_to(value_dim, kPanel));
    row = take(pad_to(value_dim, kPanel));
  }
};

int64_t scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows) {
  return Scratch(nullptr, key_dim, value_dim, rows).floats;
}

// Rows that a chunk prefetches while it computes.
struct Streams {
  RowStream keys;
  RowStream values;
  RowStream queries;

  void advance() {
    keys.advance();
    values.advance();
    queries.advance();
  }
};

int64_t panels(int64_t dim) { return pad_to(dim, kPanel) / kPanel; }

// Panels of the state.
int64_t update_steps(const LinearChunkArgs& args) { return panels(args.value_dim); }

// Lower bound on the products of one row block of one head.
int64_t attend_steps(const LinearChunkArgs& args) { return 1 + panels(args.value_dim); }

Streams next_keys_and_values(const LinearChunkArgs& args) {
  const int64_t blocks = (args.rows + kQueryRows - 1) / kQueryRows;
  const int64_t steps = update_steps(args) + args.heads * blocks * attend_steps(args);
  Streams streams;
  streams.keys = {args.next_key, args.dtype, args.key.stride, args.next_rows, args.key_dim, steps};
  streams.values = {args.next_value, args.dtype,     args.value.stride,
                    args.next_rows,  args.value_dim, steps};
  return streams;
}

// The rows of queries of the next call that lie there as the block from `first` on does here.
RowStream next_queries(const LinearChunkArgs& args, int64_t head, int64_t first) {
  const int64_t left = args.next_rows - first;
  if (left <= 0) return {};
  const int64_t offset = head * args.query.head_stride + first * args.query.stride;
  return {static_cast<const char*>(args.next_query) + offset * size_of(args.dtype),
          args.dtype,
          args.query.stride,
          left < kQueryRows ? left : kQueryRows,
          args.key_dim,
          attend_steps(args)};
}

void pack(const LinearChunkArgs& args, const Scratch& scratch) {
  pack_key_rows<Products>(pack_whole(args.key.data, args.dtype, args.key.stride, nullptr, args.rows,
                                     args.key_dim, scratch.keys));
  pack_value_rows<Products>(pack_whole(args.value.data, args.dtype, args.value.stride, nullptr,
                                       args.rows, args.value_dim, scratch.values));
  map_features(args.feature_map, pad_to(args.rows, kPanel) * args.key_dim, scratch.keys);
  const int64_t rest = args.rows % kPanel;
  if (rest == 0) return;
  float* const panel = scratch.keys + (args.rows - rest) * args.key_dim;
  for (int64_t d = 0; d < args.key_dim; ++d) {
    for (int64_t j = rest; j < kPanel; ++j) panel[d * kPanel + j] = 0.0F;
  }
}

void add_earlier(const float* start, float log_decay, int64_t floats, float* sum) {
  add_decayed(start, log_decay, floats, sum, sum);
}

// Fills the decays of rows [first, first + rows), which must come in order: each row adds its own
// step to the log decays of the previous row. Lanes after a row's own key hold any finite number.
void fill_decays(const LinearChunkArgs& args, const Scratch& scratch, int64_t first, int rows,
                 float* log_from_start) {
  const int64_t stride = score_stride(args.rows);
  float sums[kQueryRows + kLanes];
  for (int r = 0; r < rows; ++r) {
    const int64_t row = first + r;
    const float step = args.log_decay[row * args.decay_stride];
    const Vec steps = broadcast(step);
    for (int64_t j = 0; j < row; j += kLanes) {
      store(scratch.steps + j, load(scratch.steps + j) + steps);
    }
    scratch.steps[row] = 0.0F;
    exponentiate(scratch.steps, pad_to(row + 1, kLanes), scratch.decays + r * stride);
    *log_from_start += step;
    sums[r] = *log_from_start;
  }
  for (int r = rows; r < pad_to(rows, kLanes); ++r) sums[r] = 0.0F;
  exponentiate(sums, pad_to(rows, kLanes), scratch.from_start);
}

// acc = from_start * (query state) + scores * values
void multiply_rows_by_past(const LinearChunkArgs& args, const Scratch& scratch, const float* state,
                           int64_t first, int rows, Streams& streams) {
  const int64_t dim = args.key_dim, stride = score_stride(args.rows);
  const int64_t width = pad_to(args.value_dim, kPanel), padded = pad_to(args.rows, kPanel);
  for (int64_t d = 0; d < width; d += kPanel) {
    for_each_tile(rows, [&]<int kRows>(Rows<kRows>, int64_t row) {
      out_tile<kRows>({.query = scratch.query + row * dim,
                       .dim = dim,
                       .state = state ? state + d * dim : nullptr,
                       .from_start = args.log_decay && state ? scratch.from_start + row : nullptr,
                       .scores = scratch.scores + row * stride,
                       .stride = stride,
                       .num_keys = first + row + kRows,
                       .values = scratch.values + d * padded},
                      scratch.acc + row * width + d, width);
    });
    streams.advance();
  }
}

// Loads the features of rows [first, first + rows) of one query head.
void load_queries(const LinearChunkArgs& args, int64_t head, int64_t first, int rows, float* to) {
  const int64_t dim = args.key_dim;
  const bool mapped_as_loaded = args.dtype == DType::kFloat32 && dim % kLanes == 0;
  for (int r = 0; r < rows; ++r) {
    const int64_t offset = head * args.query.head_stride + (first + r) * args.query.stride;
    if (mapped_as_loaded) {
      map_features(args.feature_map, dim, static_cast<const float*>(args.query.data) + offset,
                   to + r * dim);
    } else {
      load_floats(args.query.data, args.dtype, offset, dim, 1.0F, to + r * dim);
    }
  }
  // The padding after the last row is mapped too; its contents are not used.
  if (!mapped_as_loaded) map_features(args.feature_map, rows * dim, to);
}

// Computes the output of rows [first, first + rows) of one query head.
void attend_rows_of_head(const LinearChunkArgs& args, const Scratch& scratch, const float* state,
                         int64_t head, int64_t first, int rows, Streams& streams) {
  streams.queries = next_queries(args, head, first);
  const int64_t dim = args.key_dim, width = pad_to(args.value_dim, kPanel);
  const int64_t stride = score_stride(args.rows);
  load_queries(args, head, first, rows, scratch.query);
  score_rows({.query = scratch.query,
              .dim = dim,
              .keys = scratch.keys,
              .decays = args.log_decay ? scratch.decays : nullptr,
              .stride = stride},
             first, rows, scratch.scores, [&] { streams.advance(); });
  multiply_rows_by_past(args, scratch, state, first, rows, streams);
  for (int r = 0; r < rows; ++r) {
    float factor = args.scale;
    if (args.normalize) {
      float weight = sum_of(scratch.scores + r * stride, pad_to(first + r + 1, kLanes));
      if (state) {
        const float past =
            dot(scratch.query + r * dim, state + matrix_floats(dim, args.value_dim), dim);
        weight += args.log_decay ? scratch.from_start[r] * past : past;
      }
      factor = weight == 0.0F ? 0.0F : 1.0F / weight;
    }
    write_row(scratch.acc + r * width, args.value_dim, factor, args.out.data, args.out_dtype,
              head * args.out.head_stride + (first + r) * args.out.stride, args.streams_out,
              scratch.row);
  }
}

void attend(const LinearChunkArgs& args, const Scratch& scratch, Streams& streams) {
  const float* const state =
      state_before(args, state_floats(args.key_dim, args.value_dim), scratch.state);
  if (args.log_decay) {
    for (int64_t j = 0; j < pad_to(args.rows, kPanel); ++j) scratch.steps[j] = 0.0F;
  }
  float log_from_start = 0.0F;
  for (int64_t first = 0; first < args.rows; first += kQueryRows) {
    const int rows =
        static_cast<int>(args.rows - first < kQueryRows ? args.rows - first : kQueryRows);
    if (args.log_decay) fill_decays(args, scratch, first, rows, &log_from_start);
    for (int64_t head = 0; head < args.heads; ++head) {
      attend_rows_of_head(args, scratch, state, head, first, rows, streams);
    }
  }
}

// sum = decay * sum + keys^T values for one panel of values. With decay 0, `sum` is not read. keys:
// rows of their first panel.
template <int kRows>
__attribute__((noinline)) void update_tile(const float* keys, int64_t dim, const float* values,
                                           int64_t rows, float decay, float* sum) {
  Vec acc[kRows][kTileVectors];
  load_decayed(sum, decay, acc);
  for (int64_t j = 0; j < rows; j += kPanel) {
    const int64_t depth = rows - j < kPanel ? rows - j : kPanel;
    add_products<Products>(keys + j * dim, kPanel, values + j * kPanel, depth, acc);
  }
  store_tile(acc, sum, kPanel);
}

// Keys decayed to the end of the chunk, which is how they enter the state.
const float* keys_at_end(const LinearChunkArgs& args, const Scratch& scratch) {
  if (!args.log_decay) return scratch.keys;
  const int64_t dim = args.key_dim;
  for (int64_t j = 0; j < args.rows; j += kPanel) {
    for (int64_t i = j * dim; i < (j + kPanel) * dim; i += kPanel) {
#pragma GCC unroll 2
      for (int v = 0; v < kPanel; v += kLanes) {
        store(scratch.scaled_keys + i + v,
              load(scratch.keys + i + v) * load(scratch.to_end + j + v));
      }
    }
  }
  return scratch.scaled_keys;
}

// Decays the state over the chunk and adds keys^T values and the sum of the keys.
float update_state(const LinearChunkArgs& args, const Scratch& scratch, Streams& streams) {
  const int64_t dim = args.key_dim, width = pad_to(args.value_dim, kPanel);
  const int64_t padded = pad_to(args.rows, kPanel);
  const float total =
      args.log_decay ? fill_to_end(args.log_decay, args.decay_stride, args.rows, scratch.to_end)
                     : 0.0F;
  const float decay = args.sum_is_zero ? 0.0F : args.log_decay ? exp_nonpositive(total) : 1.0F;
  const float* const keys = keys_at_end(args, scratch);
  for (int64_t d = 0; d < width; d += kPanel) {
    for_each_tile(dim, [&]<int kRows>(Rows<kRows>, int64_t row) {
      update_tile<kRows>(keys + row * kPanel, dim, scratch.values + d * padded, args.rows, decay,
                         args.sum + d * dim + row * kPanel);
    });
    streams.advance();
  }
  float* const key_sums = args.sum + matrix_floats(dim, args.value_dim);
  for (int64_t d = 0; d < dim; ++d) {
    float sum = args.sum_is_zero ? 0.0F : decay * key_sums[d];
    if (args.normalize) {
      Vec added = Vec{};
      for (int64_t i = d * kPanel; i < padded * dim; i += kPanel * dim) {
        for (int64_t v = 0; v < kPanel; v += kLanes) added += load(keys + i + v);
      }
      sum += reduce_add(added);
    }
    key_sums[d] = sum;
  }
  return total;
}

float linear_chunk(const LinearChunkArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  pack(args, scratch);
  Streams streams = next_keys_and_values(args);
  if (args.heads > 0) attend(args, scratch, streams);
  const float decayed = update_state(args, scratch, streams);
  if (args.streams_out) stream_end();
  return decayed;
}

void pack_state(const float* state, const float* normalizer, int64_t key_dim, int64_t value_dim,
                float* packed) {
  for (int64_t d0 = 0; d0 < pad_to(value_dim, kPanel); d0 += kPanel) {
    const int64_t dims = value_dim - d0 < kPanel ? value_dim - d0 : kPanel;
    for (int64_t k = 0; k < key_dim; ++k) {
      float* const out = packed + d0 * key_dim + k * kPanel;
      for (int64_t d = 0; d < dims; ++d) out[d] = state[k * value_dim + d0 + d];
      for (int64_t d = dims; d < kPanel; ++d) out[d] = 0.0F;
    }
  }
  const int64_t floats = matrix_floats(key_dim, value_dim);
  for (int64_t i = floats; i < state_floats(key_dim, value_dim); ++i) {
    packed[i] = normalizer && i < floats + key_dim ? normalizer[i - floats] : 0.0F;
  }
}

void unpack_state(const float* packed, int64_t key_dim, int64_t value_dim, float* state,
                  float* normalizer) {
  for (int64_t d0 = 0; d0 < value_dim; d0 += kPanel) {
    const int64_t dims = value_dim - d0 < kPanel ? value_dim - d0 : kPanel;
    for (int64_t k = 0; k < key_dim; ++k) {
      const float* const from = packed + d0 * key_dim + k * kPanel;
      for (int64_t d = 0; d < dims; ++d) state[k * value_dim + d0 + d] = from[d];
    }
  }
  const float* const sums = packed + matrix_floats(key_dim, value_dim);
  for (int64_t k = 0; normalizer && k < key_dim; ++k) normalizer[k] = sums[k];
}

}  // namespace

extern const LinearKernels kLinearKernels;
const LinearKernels kLinearKernels = {linear_chunk,  add_earlier,         pack_state,
                                      unpack_state,  state_floats,        scratch_floats,
                                      linear_tokens, token_scratch_floats};

}  // namespace h2o_prefill::H2O_ISA
