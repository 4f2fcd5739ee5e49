// Linear attention of one chunk: Q K^T below the diagonal with its decays, times V, plus Q times
// the state before the chunk; then the state behind it. Compiled once per instruction set.
//
// 16-bit inputs are widened where they are packed: a state is float32, and would lose digits as an
// operand of 16-bit products.
#include "kernels/cpu/linear_chunk.h"

#include "kernels/cpu/linear_rows.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {
namespace {

H2O_INLINE int64_t matrix_floats(int64_t key_dim, int64_t value_dim) {
  return key_dim * pad_to(value_dim, kPanel);
}

int64_t state_floats(int64_t key_dim, int64_t value_dim) {
  return whole_lines(matrix_floats(key_dim, value_dim) + key_dim);
}

// What a chunk needs for itself.
struct Scratch {
  float* keys;          // features [panel][dim][key of the panel], 0 behind the last key
  float* values;        // [panel over dim][key][dim of the panel]
  float* state;         // before the chunk, packed
  float* scaled_panel;  // keys of one panel with what is left of them at the end
  float* to_end;        // [rows]: what is left of a key at the end of the chunk
  float* steps;         // [rows]: log decay from each key to the row in hand
  float* decays;        // [kRowBlock, score_stride]: exp of it
  float* from_start;    // [kRowBlock]: what is left of the state before the chunk
  float* query;         // [kRowBlock, key dim] features
  float* scores;        // [kRowBlock, score_stride]
  float* acc;           // [kRowBlock, padded value dim]
  int32_t* limits;      // [rows]: keys that a row sees
  int64_t floats;       // of all

  // first: null, to count the floats alone.
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
    scaled_panel = take(kPanel * key_dim);
    to_end = take(padded);
    steps = take(padded);
    decays = take(kRowBlock * score_stride(rows));
    from_start = take(pad_to(kRowBlock, kLanes));
    query = take(kRowBlock * key_dim + kLanes);
    scores = take(kRowBlock * score_stride(rows));
    acc = take(kRowBlock * pad_to(value_dim, kPanel));
    limits = reinterpret_cast<int32_t*>(take(rows));
  }
};

int64_t scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows) {
  return Scratch(nullptr, key_dim, value_dim, rows).floats;
}

// c[rows, kPanel] = a b, or added to c. Not inlined: the loops of several products in one function
// leave each too few registers.
template <bool kAccumulate>
__attribute__((noinline)) void multiply(const float* a, int64_t lda, int rows, const RowEnds& ends,
                                        const float* b, int64_t depth, float* c, int64_t ldc) {
  multiply_rows<Products, kAccumulate>(a, lda, rows, ends, b, depth, c, ldc);
}

// What a chunk asks for while it computes.
struct Streams {
  RowStream<0> keys;  // of the next chunk
  RowStream<0> values;
  RowStream<0> queries;  // of the next row block or head
  RowStream<1> out;      // of the row block and head in hand

  void advance() {
    keys.advance();
    values.advance();
    queries.advance();
    out.advance();
  }
};

int64_t panels(int64_t dim) { return pad_to(dim, kPanel) / kPanel; }

// Products of the state update.
int64_t update_steps(const LinearChunkArgs& args) {
  return panels(args.rows) * panels(args.value_dim);
}

// Products of one row block of one head, at least.
int64_t attend_steps(const LinearChunkArgs& args) { return 1 + panels(args.value_dim); }

Streams next_chunk(const LinearChunkArgs& args) {
  const int64_t blocks = (args.rows + kRowBlock - 1) / kRowBlock;
  const int64_t steps = update_steps(args) + args.heads * blocks * attend_steps(args);
  const auto behind = [&](const void* data, int64_t stride) {
    return static_cast<const char*>(data) + args.rows * stride * size_of(args.dtype);
  };
  Streams streams;
  streams.keys = {behind(args.key, args.key_stride),
                  args.dtype,
                  args.key_stride,
                  args.rows_behind,
                  args.key_dim,
                  steps};
  streams.values = {behind(args.value, args.value_stride),
                    args.dtype,
                    args.value_stride,
                    args.rows_behind,
                    args.value_dim,
                    steps};
  return streams;
}

// The rows of queries that come after those of `head` in the row block from `first` on.
RowStream<0> next_queries(const LinearChunkArgs& args, int64_t head, int64_t first, int rows) {
  int64_t row = first;
  if (++head == args.heads) head = 0, row += rows;
  const int64_t all = args.rows + args.rows_behind;
  if (row >= all) return {};
  const int64_t count = all - row < kRowBlock ? all - row : kRowBlock;
  const int64_t offset = head * args.query_head_stride + row * args.query_stride;
  return {static_cast<const char*>(args.query) + offset * size_of(args.dtype),
          args.dtype,
          args.query_stride,
          count,
          args.key_dim,
          attend_steps(args)};
}

void pack(const LinearChunkArgs& args, const Scratch& scratch) {
  pack_key_rows<Products>(
      pack_args(args.key, args.dtype, args.key_stride, args.rows, args.key_dim, scratch.keys));
  pack_value_rows<Products>(pack_args(args.value, args.dtype, args.value_stride, args.rows,
                                      args.value_dim, scratch.values));
  map_features(args.feature_map, pad_to(args.rows, kPanel) * args.key_dim, scratch.keys);
  const int64_t rest = args.rows % kPanel;
  if (rest == 0) return;
  float* const panel = scratch.keys + (args.rows - rest) * args.key_dim;
  for (int64_t d = 0; d < args.key_dim; ++d) {
    for (int64_t j = rest; j < kPanel; ++j) panel[d * kPanel + j] = 0.0F;
  }
}

void add_earlier(const float* start, float log_decay, int64_t floats, float* sum) {
  const Vec kept = broadcast(exp_nonpositive(log_decay));
  for (int64_t i = 0; i < floats; i += kLanes) {
    store(sum + i, load(start + i) * kept + load(sum + i));
  }
}

// The state before the chunk; null: 0.
const float* state_before(const LinearChunkArgs& args, const Scratch& scratch) {
  if (args.sum_is_zero) return args.start;
  if (!args.start) return args.sum;
  const int64_t floats = state_floats(args.key_dim, args.value_dim);
  const Vec kept = broadcast(exp_nonpositive(args.start_log_decay));
  for (int64_t i = 0; i < floats; i += kLanes) {
    store(scratch.state + i, load(args.start + i) * kept + load(args.sum + i));
  }
  return scratch.state;
}

// Decays of the rows [first, first + rows), in order: each row's are the last one's and its own
// step. Lanes behind a row's own key hold any finite numbers.
void fill_decays(const LinearChunkArgs& args, const Scratch& scratch, int64_t first, int rows,
                 float* log_from_start) {
  const int64_t stride = score_stride(args.rows);
  float sums[kRowBlock + kLanes];
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

// Leaves a row's scores with the keys that it sees, decayed where `decays` is not null.
void mask_row(float* scores, const float* decays, int64_t visible, int64_t end) {
  for (int64_t j = visible; j < end; ++j) scores[j] = 0.0F;
  for (int64_t j = 0; decays && j < visible; j += kLanes) {
    store(scores + j, load(scores + j) * load(decays + j));
  }
}

// acc = from_start (query state) + scores values.
void multiply_rows_by_past(const LinearChunkArgs& args, const Scratch& scratch, const float* state,
                           int64_t first, int rows, Streams& streams) {
  const int64_t width = pad_to(args.value_dim, kPanel), padded = pad_to(args.rows, kPanel);
  const int64_t stride = score_stride(args.rows), num_keys = first + rows;
  if (state) {
    for (int64_t d = 0; d < width; d += kPanel) {
      multiply<false>(scratch.query, args.key_dim, rows, RowEnds{}, state + d * args.key_dim,
                      args.key_dim, scratch.acc + d, width);
      streams.advance();
    }
    for (int r = 0; args.log_decay && r < rows; ++r) {
      const Vec kept = broadcast(scratch.from_start[r]);
      float* const acc = scratch.acc + r * width;
      for (int64_t d = 0; d < width; d += kLanes) store(acc + d, load(acc + d) * kept);
    }
  }
  for (int64_t j = 0; j < num_keys; j += kKeyWords) {
    const int64_t depth = num_keys - j < kKeyWords ? num_keys - j : kKeyWords;
    const RowEnds ends{scratch.limits + first, j};
    for (int64_t d = 0; d < width; d += kPanel) {
      const float* const values = scratch.values + d * padded + j * kPanel;
      (state || j > 0 ? multiply<true> : multiply<false>)(scratch.scores + j, stride, rows, ends,
                                                          values, depth, scratch.acc + d, width);
      streams.advance();
    }
  }
}

// Rows [first, first + rows) of one query head.
void attend_rows_of_head(const LinearChunkArgs& args, const Scratch& scratch, const float* state,
                         int64_t head, int64_t first, int rows, Streams& streams) {
  streams.queries = next_queries(args, head, first, rows);
  streams.out = {
      static_cast<const char*>(args.out) +
          (head * args.out_head_stride + first * args.out_stride) * size_of(args.out_dtype),
      args.out_dtype,
      args.out_stride,
      rows,
      args.value_dim,
      attend_steps(args)};
  const int64_t dim = args.key_dim, width = pad_to(args.value_dim, kPanel);
  const int64_t stride = score_stride(args.rows), end = pad_to(first + rows, kPanel);
  for (int r = 0; r < rows; ++r) {
    const int64_t row = first + r;
    load_floats(args.query, args.dtype, head * args.query_head_stride + row * args.query_stride,
                dim, 1.0F, scratch.query + r * dim);
  }
  // Behind the last row, whatever is there is mapped too.
  map_features(args.feature_map, rows * dim, scratch.query);
  for (int64_t j = 0; j < end; j += kPanel) {
    multiply<false>(scratch.query, dim, rows, RowEnds{}, scratch.keys + j * dim, dim,
                    scratch.scores + j, stride);
    streams.advance();
  }
  for (int r = 0; r < rows; ++r) {
    mask_row(scratch.scores + r * stride, args.log_decay ? scratch.decays + r * stride : nullptr,
             first + r + 1, end);
  }
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
    store_floats(scratch.acc + r * width, args.value_dim, factor, args.out, args.out_dtype,
                 head * args.out_head_stride + (first + r) * args.out_stride);
  }
}

void attend(const LinearChunkArgs& args, const Scratch& scratch, Streams& streams) {
  const float* const state = state_before(args, scratch);
  for (int64_t i = 0; i < args.rows; ++i) scratch.limits[i] = static_cast<int32_t>(i + 1);
  if (args.log_decay) {
    for (int64_t j = 0; j < pad_to(args.rows, kPanel); ++j) scratch.steps[j] = 0.0F;
  }
  float log_from_start = 0.0F;
  for (int64_t first = 0; first < args.rows; first += kRowBlock) {
    const int rows =
        static_cast<int>(args.rows - first < kRowBlock ? args.rows - first : kRowBlock);
    if (args.log_decay) fill_decays(args, scratch, first, rows, &log_from_start);
    for (int64_t head = 0; head < args.heads; ++head) {
      attend_rows_of_head(args, scratch, state, head, first, rows, streams);
    }
  }
}

// Fills to_end and returns the log decay of the whole chunk.
float fill_to_end(const LinearChunkArgs& args, const Scratch& scratch) {
  const int64_t padded = pad_to(args.rows, kPanel);
  float total = 0.0F;
  for (int64_t j = padded; j-- > 0;) {
    scratch.to_end[j] = total;
    if (j < args.rows) total += args.log_decay[j * args.decay_stride];
  }
  exponentiate(scratch.to_end, padded, scratch.to_end);
  return total;
}

// Adds keys^T values, and the sum of the keys, panel by panel of keys.
float update_state(const LinearChunkArgs& args, const Scratch& scratch, Streams& streams) {
  const int64_t dim = args.key_dim, width = pad_to(args.value_dim, kPanel);
  const int64_t padded = pad_to(args.rows, kPanel);
  const int64_t floats = state_floats(dim, args.value_dim);
  float* const key_sums = args.sum + matrix_floats(dim, args.value_dim);
  const float total = args.log_decay ? fill_to_end(args, scratch) : 0.0F;
  if (args.sum_is_zero) {
    for (int64_t i = matrix_floats(dim, args.value_dim); i < floats; ++i) args.sum[i] = 0.0F;
  } else if (args.log_decay) {
    const Vec kept = broadcast(exp_nonpositive(total));
    for (int64_t i = 0; i < floats; i += kLanes) store(args.sum + i, load(args.sum + i) * kept);
  }
  for (int64_t j = 0; j < args.rows; j += kPanel) {
    const int64_t depth = args.rows - j < kPanel ? args.rows - j : kPanel;
    const float* panel = scratch.keys + j * dim;
    if (args.log_decay) {
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t i = 0; i < kPanel; i += kLanes) {
          store(scratch.scaled_panel + d * kPanel + i,
                load(panel + d * kPanel + i) * load(scratch.to_end + j + i));
        }
      }
      panel = scratch.scaled_panel;
    }
    for (int64_t d = 0; d < width; d += kPanel) {
      const float* const values = scratch.values + d * padded + j * kPanel;
      float* const sum = args.sum + d * dim;
      (args.sum_is_zero && j == 0 ? multiply<false>
                                  : multiply<true>)(panel, kPanel, static_cast<int>(dim), RowEnds{},
                                                    values, depth, sum, kPanel);
      streams.advance();
    }
    for (int64_t d = 0; args.normalize && d < dim; ++d) {
      Vec sum = Vec{};
      for (int64_t i = 0; i < kPanel; i += kLanes) sum += load(panel + d * kPanel + i);
      key_sums[d] += reduce_add(sum);
    }
  }
  return total;
}

float linear_chunk(const LinearChunkArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  pack(args, scratch);
  Streams streams = next_chunk(args);
  if (args.heads > 0) attend(args, scratch, streams);
  return update_state(args, scratch, streams);
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
const LinearKernels kLinearKernels = {linear_chunk, add_earlier,  pack_state,
                                      unpack_state, state_floats, scratch_floats};

}  // namespace h2o_prefill::H2O_ISA
