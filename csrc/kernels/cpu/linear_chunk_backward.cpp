// The gradient of linear attention of one chunk. With features q and k, the gradient o of a row of
// the output, the state S before the chunk, its adjoint R behind it, and decays D below the
// diagonal:
//   dq = o S^T + (o v^T . D) k        dk = v R^T + (o v^T . D)^T q
//                                     dv = k R   + (q k^T . D)^T o
// where S and R decay to the row. Compiled once per instruction set.
//
// The normaliser is one more column of values, all 1, whose output is the weight w of a row: its
// gradient, -(o . out) / w, is added to each product o v^T.
#include "kernels/cpu/linear_chunk_backward.h"

#include "kernels/cpu/linear_rows.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {
namespace {

// Panels of kPanel columns: of row-major matrices next to each other, of packed ones behind each
// other.
struct Matrix {
  float* data;
  int64_t stride;  // of rows
  int64_t panel_stride;

  float* row(int64_t i) const { return data + i * stride; }
};

// Row-major, columns padded to whole panels.
int64_t row_floats(int64_t columns) { return score_stride(columns); }
Matrix rows_of(float* data, int64_t columns) { return {data, row_floats(columns), kPanel}; }
// As tiles read it.
Matrix packed(const float* data, int64_t height) {
  return {const_cast<float*>(data), kPanel, height * kPanel};
}

int64_t matrix_floats(int64_t key_dim, int64_t value_dim) {
  return value_dim * pad_to(key_dim, kPanel);
}

int64_t state_floats(int64_t key_dim, int64_t value_dim) {
  return whole_lines(matrix_floats(key_dim, value_dim) + pad_to(key_dim, kPanel));
}

// What a chunk needs for itself.
struct Scratch {
  Matrix keys;         // [rows, key dim] features
  Matrix values;       // [rows, value dim]
  Matrix query;        // [rows, key dim] features
  Matrix grad_out;     // [rows, value dim]
  Matrix grad_key;     // [rows, key dim]; or of a query
  Matrix grad_value;   // [rows, value dim]
  Matrix scores;       // [rows, rows]: query times key
  Matrix products;     // [rows, rows]: output gradient times value
  Matrix decays;       // [rows, rows]: what is left of a key at a row; any finite number above
  float* keys_packed;  // [panel][key dim][key of the panel], 0 behind the last key
  float* values_packed;
  float* state;       // in the direction of the walk, before the chunk
  float* transposed;  // the same as [panel over value dim][key dim][dim of the panel]
  float* from_start;  // [rows]: what is left of the state before the chunk
  float* to_end;      // [rows]: what is left of a key at the end of the chunk
  float* steps;       // [rows]: log decay from each key to the row in hand
  int64_t floats;     // of all

  // first: null, to count the floats alone.
  Scratch(float* first, int64_t key_dim, int64_t value_dim, int64_t rows) {
    const int64_t padded = pad_to(rows, kPanel);
    floats = 0;
    const auto take = [&](int64_t count) {
      float* const part = first ? first + floats : nullptr;
      floats += whole_lines(count);
      return part;
    };
    const auto take_rows = [&](int64_t columns) {
      return rows_of(take(rows * row_floats(columns)), columns);
    };
    keys = take_rows(key_dim);
    values = take_rows(value_dim);
    query = take_rows(key_dim);
    grad_out = take_rows(value_dim);
    grad_key = take_rows(key_dim);
    grad_value = take_rows(value_dim);
    scores = take_rows(rows);
    products = take_rows(rows);
    decays = take_rows(rows);
    keys_packed = take(padded * key_dim);
    values_packed = take(padded * value_dim);
    state = take(state_floats(key_dim, value_dim));
    transposed = take(key_dim * pad_to(value_dim, kPanel));
    from_start = take(padded);
    to_end = take(padded);
    steps = take(padded);
  }
};

int64_t scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows) {
  return Scratch(nullptr, key_dim, value_dim, rows).floats;
}

int64_t panels(int64_t dim) { return pad_to(dim, kPanel) / kPanel; }

// What a chunk asks for while it computes.
struct Streams {
  RowStream<0> keys;  // of the next chunk
  RowStream<0> values;
  RowStream<0> queries;  // of the next head
  RowStream<0> grad_out;
  RowStream<1> grad_key;  // or of the query head in hand
  RowStream<1> grad_value;

  void advance() {
    keys.advance();
    values.advance();
    queries.advance();
    grad_out.advance();
    grad_key.advance();
    grad_value.advance();
  }
};

// Tiles that are multiplied for one head, at least.
int64_t head_steps(const LinearGradientArgs& args) {
  return (args.rows / kTileRows + 1) * (2 * panels(args.key_dim) + panels(args.value_dim));
}

template <int kWrite>
RowStream<kWrite> stream_of(const LinearGradientArgs& args, const LinearRows& of, int64_t head,
                            int64_t row, int64_t rows, int64_t dim, int64_t steps) {
  const int64_t offset = head * of.head_stride + row * of.stride;
  return {static_cast<const char*>(of.data) + offset * size_of(args.dtype),
          args.dtype,
          of.stride,
          rows,
          dim,
          steps};
}

Streams next_chunk(const LinearGradientArgs& args) {
  const int64_t steps = args.heads * head_steps(args);
  Streams streams;
  streams.keys = stream_of<0>(args, args.key, 0, args.next, args.next_rows, args.key_dim, steps);
  streams.values =
      stream_of<0>(args, args.value, 0, args.next, args.next_rows, args.value_dim, steps);
  return streams;
}

void ask_for_next_head(const LinearGradientArgs& args, int64_t head, Streams& streams) {
  const bool in_chunk = head + 1 < args.heads;
  const int64_t row = in_chunk ? 0 : args.next, rows = in_chunk ? args.rows : args.next_rows;
  const int64_t next = in_chunk ? head + 1 : 0, steps = head_steps(args);
  streams.queries = stream_of<0>(args, args.query, next, row, rows, args.key_dim, steps);
  streams.grad_out = stream_of<0>(args, args.grad_out, next, row, rows, args.value_dim, steps);
}

// Where a square left factor is not zero.
enum class Shape { kFull, kLower, kUpper };

// c[rows from first_row on, columns] (+)= a[rows, depth] b[depth, columns]. kTransposed: a lies as
// [depth, rows]. Not inlined: the loops of several products in one function leave each too few
// registers.
template <bool kTransposed, bool kAccumulate>
__attribute__((noinline)) void multiply_panel(const Matrix& a, Shape shape, int64_t first_row,
                                              int64_t rows, int64_t depth, const float* b,
                                              int64_t ldb, float* c, int64_t ldc,
                                              Streams& streams) {
  int64_t row = first_row;
#define H2O_TILE(n)                                                                     \
  const int64_t begin = shape == Shape::kUpper ? row : 0;                               \
  const int64_t end = shape == Shape::kLower && row + n < depth ? row + n : depth;      \
  multiply_tile<Products, kAccumulate, n, kTransposed>(                                 \
      kTransposed ? a.row(begin) + row : a.row(row) + begin, a.stride, b + begin * ldb, \
      end - begin, c + row * ldc, ldc, ldb)
  for (; row + kTileRows <= rows; row += kTileRows) {
    H2O_TILE(kTileRows);
    streams.advance();
  }
  const int64_t rest = rows - row;
  if (rest & 4) {
    H2O_TILE(4);
    row += 4;
  }
  if (rest & 2) {
    H2O_TILE(2);
    row += 2;
  }
  if (rest & 1) {
    H2O_TILE(1);
  }
#undef H2O_TILE
}

template <bool kTransposed>
void multiply(const Matrix& a, Shape shape, int64_t rows, int64_t depth, const Matrix& b,
              int64_t columns, const Matrix& c, bool accumulate, Streams& streams) {
  for (int64_t j = 0; j < columns; j += kPanel) {
    const int64_t panel = j / kPanel;
    const auto multiply_one =
        accumulate ? multiply_panel<kTransposed, true> : multiply_panel<kTransposed, false>;
    multiply_one(a, shape, 0, rows, depth, b.data + panel * b.panel_stride, b.stride,
                 c.data + panel * c.panel_stride, c.stride, streams);
  }
}

// c[rows, rows] = a b, at least on and below the diagonal.
void multiply_below(const Matrix& a, int64_t rows, int64_t depth, const float* b, const Matrix& c,
                    Streams& streams) {
  const Matrix columns = packed(b, depth);
  for (int64_t j = 0; j < rows; j += kPanel) {
    const int64_t panel = j / kPanel;
    multiply_panel<false, false>(a, Shape::kFull, j, rows, depth,
                                 columns.data + panel * columns.panel_stride, columns.stride,
                                 c.data + panel * c.panel_stride, c.stride, streams);
  }
}

// Of one row of padded columns.
void fill(float* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) row[i] = 0.0F;
}

void scale_row(float* row, int64_t n, float factor) {
  const Vec factors = broadcast(factor);
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(row + i) * factors);
}

// row += factor x
void add_row(const float* x, int64_t n, float factor, float* row) {
  const Vec factors = broadcast(factor);
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(x + i) * factors + load(row + i));
}

// The rows of a head in float32, columns behind the last one 0. factors: one a row; null: `factor`
// for all.
void load_rows(const LinearGradientArgs& args, const LinearRows& from, int64_t head, int64_t dim,
               const float* factors, float factor, const Matrix& to) {
  for (int64_t i = 0; i < args.rows; ++i) {
    load_floats(from.data, args.dtype, head * from.head_stride + i * from.stride, dim,
                factors ? factors[i] : factor, to.row(i));
    fill(to.row(i), dim, pad_to(dim, kPanel));
  }
}

void load_features(const LinearGradientArgs& args, const LinearRows& from, int64_t head,
                   const Matrix& to) {
  const int64_t dim = args.key_dim;
  load_rows(args, from, head, dim, nullptr, 1.0F, to);
  if (args.feature_map == FeatureMap::kIdentity) return;
  for (int64_t i = 0; i < args.rows; ++i) {
    map_features(args.feature_map, pad_to(dim, kLanes), to.row(i));
    fill(to.row(i), dim, pad_to(dim, kPanel));
  }
}

void pack_columns(const Matrix& from, int64_t rows, int64_t dim, float* to) {
  pack_key_rows<Products>(pack_args(from.data, DType::kFloat32, from.stride, rows, dim, to));
}

// Stores a gradient of features as that of what they were made of.
void store_gradients(const LinearGradientArgs& args, const Matrix& features, const Matrix& gradient,
                     const LinearRows& to, int64_t head) {
  const Vec zero = Vec{}, one = broadcast(1.0F);
  for (int64_t i = 0; i < args.rows; ++i) {
    float* const row = gradient.row(i);
    const float* const x = features.row(i);
    if (args.feature_map == FeatureMap::kRelu) {
      for (int64_t d = 0; d < args.key_dim; d += kLanes) {
        store(row + d, load(x + d) <= zero ? zero : load(row + d));
      }
    } else if (args.feature_map == FeatureMap::kEluPlusOne) {
      // exp(x) is the feature itself up to 0, where it is 1.
      for (int64_t d = 0; d < args.key_dim; d += kLanes) {
        const Vec feature = load(x + d);
        store(row + d, load(row + d) * (feature > one ? one : feature));
      }
    }
    store_floats(row, args.key_dim, 1.0F, to.data, args.dtype,
                 head * to.head_stride + i * to.stride);
  }
}

// Fills from_start and to_end, and returns the log decay of the whole chunk.
float fill_ends(const LinearGradientArgs& args, const Scratch& scratch) {
  if (!args.log_decay) return 0.0F;
  const int64_t padded = pad_to(args.rows, kPanel);
  float sum = 0.0F;
  for (int64_t j = padded; j-- > 0;) {
    scratch.to_end[j] = sum;
    if (j < args.rows) sum += args.log_decay[j * args.decay_stride];
  }
  exponentiate(scratch.to_end, padded, scratch.to_end);
  float total = 0.0F;
  for (int64_t i = 0; i < padded; ++i) {
    if (i < args.rows) total += args.log_decay[i * args.decay_stride];
    scratch.from_start[i] = total;
  }
  exponentiate(scratch.from_start, padded, scratch.from_start);
  return total;
}

// Each row's decays are the last one's and its own step.
void fill_decays(const LinearGradientArgs& args, const Scratch& scratch) {
  if (!args.log_decay) return;
  fill(scratch.steps, 0, pad_to(args.rows, kPanel));
  for (int64_t i = 0; i < args.rows; ++i) {
    const Vec step = broadcast(args.log_decay[i * args.decay_stride]);
    for (int64_t j = 0; j < i; j += kLanes) {
      store(scratch.steps + j, load(scratch.steps + j) + step);
    }
    scratch.steps[i] = 0.0F;
    exponentiate(scratch.steps, pad_to(i + 1, kLanes), scratch.decays.row(i));
  }
}

// Leaves row i of products of rows what is left of them at the row.
void decay_row(const LinearGradientArgs& args, const Scratch& scratch, const Matrix& products,
               int64_t i) {
  float* const row = products.row(i);
  if (args.log_decay) {
    const float* const decays = scratch.decays.row(i);
    for (int64_t j = 0; j <= i; j += kLanes) store(row + j, load(row + j) * load(decays + j));
  }
  fill(row, i + 1, pad_to(args.rows, kPanel));
}

// In the direction of the walk, the state before the chunk; null: 0.
const float* state_before(const LinearGradientArgs& args, const Scratch& scratch) {
  if (args.sum_is_zero) return args.start;
  if (!args.start) return args.sum;
  const int64_t floats = state_floats(args.key_dim, args.value_dim);
  const Vec kept = broadcast(exp_nonpositive(args.start_log_decay));
  for (int64_t i = 0; i < floats; i += kLanes) {
    store(scratch.state + i, load(args.start + i) * kept + load(args.sum + i));
  }
  return scratch.state;
}

float* normalizer_of(float* state, const LinearGradientArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}
const float* normalizer_of(const float* state, const LinearGradientArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}

// Makes `sum` ready for what the chunk adds.
void decay_sum(const LinearGradientArgs& args, float log_decay) {
  const int64_t matrix = matrix_floats(args.key_dim, args.value_dim);
  const int64_t floats = state_floats(args.key_dim, args.value_dim);
  if (args.sum_is_zero) {
    fill(args.sum, matrix, floats);
  } else if (args.log_decay) {
    scale_row(args.sum, floats, exp_nonpositive(log_decay));
  }
}

// Adds values^T keys, and the sum of the keys; decays the keys.
void add_keys(const LinearGradientArgs& args, const Scratch& scratch, float log_decay,
              Streams& streams) {
  decay_sum(args, log_decay);
  const int64_t width = pad_to(args.key_dim, kPanel);
  for (int64_t j = 0; args.log_decay && j < args.rows; ++j) {
    scale_row(scratch.keys.row(j), width, scratch.to_end[j]);
  }
  multiply<true>(scratch.values, Shape::kFull, args.value_dim, args.rows, scratch.keys,
                 args.key_dim, packed(args.sum, args.value_dim), !args.sum_is_zero, streams);
  for (int64_t j = 0; args.normalize && j < args.rows; ++j) {
    add_row(scratch.keys.row(j), width, 1.0F, normalizer_of(args.sum, args));
  }
}

// Adds grad_out^T query of a head, and the sum of its queries times the gradients of their weights;
// decays grad_out.
void add_queries(const LinearGradientArgs& args, const Scratch& scratch, int64_t head,
                 float log_decay, Streams& streams) {
  if (head == 0) decay_sum(args, log_decay);
  for (int64_t i = 0; args.log_decay && i < args.rows; ++i) {
    scale_row(scratch.grad_out.row(i), pad_to(args.value_dim, kPanel), scratch.from_start[i]);
  }
  multiply<true>(scratch.grad_out, Shape::kFull, args.value_dim, args.rows, scratch.query,
                 args.key_dim, packed(args.sum, args.value_dim), head > 0 || !args.sum_is_zero,
                 streams);
  const float* const grad_weight = args.grad_weight + head * args.weight_head_stride;
  for (int64_t i = 0; args.normalize && i < args.rows; ++i) {
    const float kept = args.log_decay ? scratch.from_start[i] : 1.0F;
    add_row(scratch.query.row(i), pad_to(args.key_dim, kPanel), kept * grad_weight[i],
            normalizer_of(args.sum, args));
  }
}

void load_grad_out(const LinearGradientArgs& args, const Scratch& scratch, int64_t head) {
  load_rows(args, args.grad_out, head, args.value_dim,
            args.normalize ? args.inverse + head * args.weight_head_stride : nullptr, args.scale,
            scratch.grad_out);
}

void load_keys(const LinearGradientArgs& args, const Scratch& scratch) {
  load_features(args, args.key, 0, scratch.keys);
  load_rows(args, args.value, 0, args.value_dim, nullptr, 1.0F, scratch.values);
}

// The weights of the rows and their gradients; divides by the weights what grad_out has been
// multiplied with, and adds to it what the weights give. `gradient` holds grad_out S^T, not
// decayed.
void normalize_rows(const LinearGradientArgs& args, const Scratch& scratch, const float* state,
                    int64_t head) {
  const int64_t dim = args.key_dim, width = pad_to(dim, kPanel);
  const float* const sums = state ? normalizer_of(state, args) : nullptr;
  float* const inverse = args.inverse + head * args.weight_head_stride;
  float* const grad_weight = args.grad_weight + head * args.weight_head_stride;
  for (int64_t i = 0; i < args.rows; ++i) {
    const int64_t visible = pad_to(i + 1, kLanes);
    float* const query = scratch.query.row(i);
    float* const score = scratch.scores.row(i);
    float* const product = scratch.products.row(i);
    float* const gradient = scratch.grad_key.row(i);
    decay_row(args, scratch, scratch.scores, i);
    fill(product, i + 1, visible);
    float weight = sum_of(score, visible), along = dot(score, product, visible);
    if (state) {
      const float kept = args.log_decay ? scratch.from_start[i] : 1.0F;
      weight += kept * dot(query, sums, dim);
      along += kept * dot(query, gradient, dim);
    }
    inverse[i] = weight == 0.0F ? 0.0F : 1.0F / weight;
    grad_weight[i] = -(along * inverse[i]) * inverse[i];
    const Vec factor = broadcast(inverse[i]), added = broadcast(grad_weight[i]);
    for (int64_t j = 0; j < visible; j += kLanes) {
      store(product + j, load(product + j) * factor + added);
    }
    if (!state) continue;
    scale_row(gradient, width, inverse[i]);
    add_row(sums, width, grad_weight[i], gradient);
  }
}

void differentiate_queries(const LinearGradientArgs& args, const Scratch& scratch,
                           const float* state, int64_t head, Streams& streams) {
  const int64_t rows = args.rows, dim = args.key_dim;
  const Matrix& gradient = scratch.grad_key;
  load_features(args, args.query, head, scratch.query);
  load_rows(args, args.grad_out, head, args.value_dim, nullptr, args.normalize ? 1.0F : args.scale,
            scratch.grad_out);
  ask_for_next_head(args, head, streams);
  streams.grad_key = stream_of<1>(args, args.grad_query, head, 0, rows, dim, head_steps(args));
  multiply_below(scratch.grad_out, rows, args.value_dim, scratch.values_packed, scratch.products,
                 streams);
  if (state) {
    multiply<false>(scratch.grad_out, Shape::kFull, rows, args.value_dim,
                    packed(state, args.value_dim), dim, gradient, false, streams);
  }
  if (args.normalize) {
    multiply_below(scratch.query, rows, dim, scratch.keys_packed, scratch.scores, streams);
    normalize_rows(args, scratch, state, head);
  }
  for (int64_t i = 0; i < rows; ++i) {
    decay_row(args, scratch, scratch.products, i);
    if (state && args.log_decay) {
      scale_row(gradient.row(i), pad_to(dim, kPanel), scratch.from_start[i]);
    }
  }
  multiply<false>(scratch.products, Shape::kLower, rows, rows, scratch.keys, dim, gradient,
                  state != nullptr, streams);
  for (int64_t i = 0; args.flow && i < rows; ++i) {
    const float along = dot(scratch.query.row(i), gradient.row(i), dim);
    args.flow[i] = head == 0 ? along : args.flow[i] + along;
  }
  store_gradients(args, scratch.query, gradient, args.grad_query, head);
}

// [panel over D][Dv][kPanel] as [panel over Dv][D][kPanel], 0 behind the last value.
void transpose_state(const float* from, int64_t key_dim, int64_t value_dim, float* to) {
  for (int64_t k = 0; k < key_dim; k += kLanes) {
    const float* const columns = from + k / kPanel * kPanel * value_dim + k % kPanel;
    const int64_t keys = key_dim - k < kLanes ? key_dim - k : kLanes;
    for (int64_t v = 0; v < pad_to(value_dim, kPanel); v += kLanes) {
      float* const out = to + v / kPanel * kPanel * key_dim + k * kPanel + v % kPanel;
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        x[i] = v + i < value_dim ? load(columns + (v + i) * kPanel) : Vec{};
      }
      transpose(x);
      if (keys == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + i * kPanel, x[i]);
      } else {
        for (int64_t i = 0; i < keys; ++i) store(out + i * kPanel, x[i]);
      }
    }
  }
}

// What the adjoint behind the chunk gives.
void differentiate_by_adjoint(const LinearGradientArgs& args, const Scratch& scratch,
                              const float* adjoint, Streams& streams) {
  const int64_t rows = args.rows, dim = args.key_dim, value_dim = args.value_dim;
  multiply<false>(scratch.values, Shape::kFull, rows, value_dim, packed(adjoint, value_dim), dim,
                  scratch.grad_key, false, streams);
  transpose_state(adjoint, dim, value_dim, scratch.transposed);
  multiply<false>(scratch.keys, Shape::kFull, rows, dim, packed(scratch.transposed, dim), value_dim,
                  scratch.grad_value, false, streams);
  for (int64_t j = 0; j < rows; ++j) {
    float* const key = scratch.grad_key.row(j);
    if (args.normalize) add_row(normalizer_of(adjoint, args), pad_to(dim, kPanel), 1.0F, key);
    if (!args.log_decay) continue;
    scale_row(key, pad_to(dim, kPanel), scratch.to_end[j]);
    scale_row(scratch.grad_value.row(j), pad_to(value_dim, kPanel), scratch.to_end[j]);
  }
}

void differentiate_keys(const LinearGradientArgs& args, const Scratch& scratch, int64_t head,
                        bool accumulate, Streams& streams) {
  const int64_t rows = args.rows, dim = args.key_dim, value_dim = args.value_dim;
  multiply_below(scratch.query, rows, dim, scratch.keys_packed, scratch.scores, streams);
  multiply_below(scratch.grad_out, rows, value_dim, scratch.values_packed, scratch.products,
                 streams);
  const float* const grad_weight = args.grad_weight + head * args.weight_head_stride;
  for (int64_t i = 0; i < rows; ++i) {
    if (args.normalize) {
      float* const product = scratch.products.row(i);
      const Vec added = broadcast(grad_weight[i]);
      for (int64_t j = 0; j <= i; j += kLanes) store(product + j, load(product + j) + added);
    }
    decay_row(args, scratch, scratch.scores, i);
    decay_row(args, scratch, scratch.products, i);
  }
  multiply<true>(scratch.products, Shape::kUpper, rows, rows, scratch.query, dim, scratch.grad_key,
                 accumulate, streams);
  multiply<true>(scratch.scores, Shape::kUpper, rows, rows, scratch.grad_out, value_dim,
                 scratch.grad_value, accumulate, streams);
}

float add_state(const LinearGradientArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  load_keys(args, scratch);
  const float total = fill_ends(args, scratch);
  add_keys(args, scratch, total, streams);
  return total;
}

float add_adjoint(const LinearGradientArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  const float total = fill_ends(args, scratch);
  for (int64_t head = 0; head < args.heads; ++head) {
    load_features(args, args.query, head, scratch.query);
    load_grad_out(args, scratch, head);
    ask_for_next_head(args, head, streams);
    add_queries(args, scratch, head, total, streams);
  }
  return total;
}

float walk_forward(const LinearGradientArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  load_keys(args, scratch);
  pack_columns(scratch.values, args.rows, args.value_dim, scratch.values_packed);
  if (args.normalize) pack_columns(scratch.keys, args.rows, args.key_dim, scratch.keys_packed);
  const float total = fill_ends(args, scratch);
  fill_decays(args, scratch);
  const float* const state = state_before(args, scratch);
  for (int64_t head = 0; head < args.heads; ++head) {
    differentiate_queries(args, scratch, state, head, streams);
  }
  add_keys(args, scratch, total, streams);
  return total;
}

float walk_backward(const LinearGradientArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  load_keys(args, scratch);
  pack_columns(scratch.values, args.rows, args.value_dim, scratch.values_packed);
  pack_columns(scratch.keys, args.rows, args.key_dim, scratch.keys_packed);
  const float total = fill_ends(args, scratch);
  fill_decays(args, scratch);
  const float* const adjoint = state_before(args, scratch);
  const int64_t steps = args.heads * head_steps(args);
  streams.grad_key = stream_of<1>(args, args.grad_key, 0, 0, args.rows, args.key_dim, steps);
  streams.grad_value = stream_of<1>(args, args.grad_value, 0, 0, args.rows, args.value_dim, steps);
  if (adjoint) differentiate_by_adjoint(args, scratch, adjoint, streams);
  for (int64_t head = 0; head < args.heads; ++head) {
    load_features(args, args.query, head, scratch.query);
    load_grad_out(args, scratch, head);
    ask_for_next_head(args, head, streams);
    differentiate_keys(args, scratch, head, adjoint || head > 0, streams);
    add_queries(args, scratch, head, total, streams);
  }
  for (int64_t j = 0; args.flow && j < args.rows; ++j) {
    args.flow[j] -= dot(scratch.keys.row(j), scratch.grad_key.row(j), args.key_dim);
  }
  store_gradients(args, scratch.keys, scratch.grad_key, args.grad_key, 0);
  for (int64_t j = 0; j < args.rows; ++j) {
    store_floats(scratch.grad_value.row(j), args.value_dim, 1.0F, args.grad_value.data, args.dtype,
                 j * args.grad_value.stride);
  }
  return total;
}

void pack_state(const float* state, const float* normalizer, int64_t key_dim, int64_t value_dim,
                float* out) {
  fill(out, 0, state_floats(key_dim, value_dim));
  for (int64_t k = 0; k < key_dim; ++k) {
    float* const column = out + k / kPanel * kPanel * value_dim + k % kPanel;
    for (int64_t v = 0; state && v < value_dim; ++v) column[v * kPanel] = state[k * value_dim + v];
    if (normalizer) out[matrix_floats(key_dim, value_dim) + k] = normalizer[k];
  }
}

void unpack_state(const float* from, int64_t key_dim, int64_t value_dim, float* state,
                  float* normalizer) {
  for (int64_t k = 0; k < key_dim; ++k) {
    const float* const column = from + k / kPanel * kPanel * value_dim + k % kPanel;
    for (int64_t v = 0; state && v < value_dim; ++v) state[k * value_dim + v] = column[v * kPanel];
    if (normalizer) normalizer[k] = from[matrix_floats(key_dim, value_dim) + k];
  }
}

float dot_states(const float* a, const float* b, int64_t floats) { return dot(a, b, floats); }

}  // namespace

extern const LinearGradientKernels kLinearGradientKernels;
const LinearGradientKernels kLinearGradientKernels = {add_state,     add_adjoint,  walk_forward,
                                                      walk_backward, pack_state,   unpack_state,
                                                      dot_states,    state_floats, scratch_floats};

}  // namespace h2o_prefill::H2O_ISA
