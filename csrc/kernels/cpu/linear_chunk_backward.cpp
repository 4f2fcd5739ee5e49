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
#include "kernels/cpu/linear_tiles.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {
namespace {

// Row-major, columns padded to whole panels.
struct Matrix {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};

int64_t row_floats(int64_t columns) { return score_stride(columns); }
Matrix rows_of(float* data, int64_t columns) { return {data, row_floats(columns)}; }

int64_t matrix_floats(int64_t key_dim, int64_t value_dim) {
  return value_dim * pad_to(key_dim, kPanel);
}

int64_t state_floats(int64_t key_dim, int64_t value_dim) {
  return whole_lines(matrix_floats(key_dim, value_dim) + pad_to(key_dim, kPanel));
}

// Rows of query heads that are multiplied together, up to this many but one head at least.
constexpr int64_t kBlockRows = 128;

int64_t heads_of_block(int64_t rows) { return rows < kBlockRows ? kBlockRows / rows : 1; }

// What a chunk needs for itself. A block is of several query heads, one behind the other.
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
  Matrix decays;       // [rows, rows]: what is left of a key at a row; any finite number above
  float* keys_packed;  // [panel][key dim][key of the panel], 0 behind the last key
  float* values_packed;
  float* state;       // in the direction of the walk, before the chunk
  float* transposed;  // the same as [panel over value dim][key dim][dim of the panel]
  float* from_start;  // [rows]: what is left of the state before the chunk
  float* to_end;      // [rows]: what is left of a key at the end of the chunk
  float* steps;       // [rows]: log decay from each key to the row in hand
  float* row;         // [key dim or value dim]
  int64_t floats;     // of all

  // first: null, to count the floats alone.
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

int64_t scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows) {
  return Scratch(nullptr, key_dim, value_dim, rows).floats;
}

int64_t panels(int64_t dim) { return pad_to(dim, kPanel) / kPanel; }

// What a chunk asks for while it computes.
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

// Panels that are multiplied for one head, at least.
int64_t head_steps(const LinearGradientArgs& args) {
  return panels(args.rows) + panels(args.key_dim);
}

RowStream stream_of(const LinearGradientArgs& args, const LinearRows& of, int64_t head, int64_t row,
                    int64_t rows, int64_t dim, int64_t steps) {
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
  streams.keys = stream_of(args, args.key, 0, args.next, args.next_rows, args.key_dim, steps);
  streams.values = stream_of(args, args.value, 0, args.next, args.next_rows, args.value_dim, steps);
  return streams;
}

// Asks for the rows of the head that comes when `count` heads have been multiplied from `head` on,
// the next chunk's from its first head on, within so many panels.
void ask_for_head(const LinearGradientArgs& args, int64_t head, int64_t count, int64_t steps,
                  Streams& streams) {
  const bool in_chunk = head + count < args.heads;
  const int64_t row = in_chunk ? 0 : args.next, rows = in_chunk ? args.rows : args.next_rows;
  const int64_t next = in_chunk ? head + count : head % count;
  streams.queries = stream_of(args, args.query, next, row, rows, args.key_dim, steps);
  streams.grad_out = stream_of(args, args.grad_out, next, row, rows, args.value_dim, steps);
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
  const bool mapped_as_loaded = args.dtype == DType::kFloat32 && dim % kLanes == 0;
  if (!mapped_as_loaded) load_rows(args, from, head, dim, nullptr, 1.0F, to);
  for (int64_t i = 0; i < args.rows; ++i) {
    if (mapped_as_loaded) {
      const float* const data = static_cast<const float*>(from.data);
      map_features(args.feature_map, dim, data + head * from.head_stride + i * from.stride,
                   to.row(i));
    } else {
      map_features(args.feature_map, pad_to(dim, kLanes), to.row(i));
    }
    fill(to.row(i), dim, pad_to(dim, kPanel));
  }
}

void pack_columns(const Matrix& from, int64_t rows, int64_t dim, float* to) {
  pack_key_rows<Products>(pack_args(from.data, DType::kFloat32, from.stride, rows, dim, to));
}

// Stores a gradient of features as that of what they were made of.
void store_gradients(const LinearGradientArgs& args, const Scratch& scratch, const Matrix& features,
                     const Matrix& gradient, const LinearRows& to, int64_t head) {
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
    write_row(row, args.key_dim, 1.0F, to.data, args.dtype, head * to.head_stride + i * to.stride,
              args.past_caches, scratch.row);
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

float* normalizer_of(float* state, const LinearGradientArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}
const float* normalizer_of(const float* state, const LinearGradientArgs& args) {
  return state + matrix_floats(args.key_dim, args.value_dim);
}

// sum = kept sum + a^T b of one panel; kept is 0 where `sum` is not to be read.
template <int kRows>
__attribute__((noinline)) void sum_tile(const float* a, int64_t lda, const float* b, int64_t ldb,
                                        int64_t depth, float kept, float* sum) {
  Vec acc[kRows][kTileVectors];
  const Vec factor = broadcast(kept);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v)
      acc[i][v] = kept == 0.0F ? Vec{} : load(sum + i * kPanel + v * kLanes) * factor;
  }
  add_products<Products, /*kTransposed=*/true>(a, lda, b, ldb, depth, acc);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(sum + i * kPanel + v * kLanes, acc[i][v]);
  }
}

// Adds values^T keys of so many rows to a state, of which `kept` is left.
void add_to_state(const LinearGradientArgs& args, const Matrix& values, const Matrix& keys,
                  int64_t rows, float kept, Streams& streams) {
  for (int64_t d = 0; d < args.key_dim; d += kPanel) {
    for_each_tile(args.value_dim, [&]<int kRows>(Rows<kRows>, int64_t row) {
      sum_tile<kRows>(values.data + row, values.stride, keys.data + d, keys.stride, rows, kept,
                      args.sum + d * args.value_dim + row * kPanel);
    });
    streams.advance();
  }
}

// Of what is in `sum`; 0: nothing is.
float kept_of_sum(const LinearGradientArgs& args, float log_decay) {
  if (args.sum_is_zero) return 0.0F;
  return args.log_decay ? exp_nonpositive(log_decay) : 1.0F;
}

// What is behind the matrix of `sum`.
void decay_normalizer(const LinearGradientArgs& args, float kept) {
  float* const sums = normalizer_of(args.sum, args);
  const int64_t floats =
      state_floats(args.key_dim, args.value_dim) - matrix_floats(args.key_dim, args.value_dim);
  if (kept == 0.0F) {
    fill(sums, 0, floats);
  } else {
    scale_row(sums, floats, kept);
  }
}

// Adds values^T keys, and the sum of the keys; decays the keys.
void add_keys(const LinearGradientArgs& args, const Scratch& scratch, float log_decay,
              Streams& streams) {
  const int64_t width = pad_to(args.key_dim, kPanel);
  const float kept = kept_of_sum(args, log_decay);
  for (int64_t j = 0; args.log_decay && j < args.rows; ++j) {
    scale_row(scratch.keys.row(j), width, scratch.to_end[j]);
  }
  add_to_state(args, scratch.values, scratch.keys, args.rows, kept, streams);
  decay_normalizer(args, kept);
  for (int64_t j = 0; args.normalize && j < args.rows; ++j) {
    add_row(scratch.keys.row(j), width, 1.0F, normalizer_of(args.sum, args));
  }
}

// Query heads [first, first + count), in scratch one behind the other.
struct Block {
  int64_t first;
  int64_t count;
};

// Adds grad_out^T query of a block, and the sum of its queries times the gradients of their
// weights; decays grad_out.
void add_queries(const LinearGradientArgs& args, const Scratch& scratch, const Block& block,
                 float log_decay, Streams& streams) {
  const int64_t rows = block.count * args.rows;
  const float kept = block.first == 0 ? kept_of_sum(args, log_decay) : 1.0F;
  for (int64_t i = 0; args.log_decay && i < rows; ++i) {
    scale_row(scratch.grad_out.row(i), pad_to(args.value_dim, kPanel),
              scratch.from_start[i % args.rows]);
  }
  add_to_state(args, scratch.grad_out, scratch.query, rows, kept, streams);
  if (block.first == 0) decay_normalizer(args, kept);
  for (int64_t i = 0; args.normalize && i < rows; ++i) {
    const int64_t head = block.first + i / args.rows, row = i % args.rows;
    const float left = args.log_decay ? scratch.from_start[row] : 1.0F;
    add_row(scratch.query.row(i), pad_to(args.key_dim, kPanel),
            left * args.grad_weight[head * args.weight_head_stride + row],
            normalizer_of(args.sum, args));
  }
}

// Part of scratch of a head of a block.
Matrix of_head(const LinearGradientArgs& args, const Matrix& block, int64_t i) {
  return {block.row(i * args.rows), block.stride};
}

// Features of queries, and output gradients divided by their weights.
void load_block(const LinearGradientArgs& args, const Scratch& scratch, const Block& block) {
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t head = block.first + i;
    load_features(args, args.query, head, of_head(args, scratch.query, i));
    load_rows(args, args.grad_out, head, args.value_dim,
              args.normalize ? args.inverse + head * args.weight_head_stride : nullptr, args.scale,
              of_head(args, scratch.grad_out, i));
  }
}

template <typename Function>
void for_each_block(const LinearGradientArgs& args, const Function& f) {
  const int64_t most = heads_of_block(args.rows);
  for (int64_t first = 0; first < args.heads; first += most) {
    f(Block{first, args.heads - first < most ? args.heads - first : most});
  }
}

// c = a b of one head, 0 above the diagonal. added: to the products of each row; null: nothing.
void multiply_below(const LinearGradientArgs& args, const Scratch& scratch, const Matrix& a,
                    int64_t dim, const float* packed_columns, const float* added, bool decayed,
                    const Matrix& c, Streams& streams) {
  score_rows({.query = a.data,
              .query_stride = a.stride,
              .dim = dim,
              .keys = packed_columns,
              .added = added,
              .decays = decayed && args.log_decay ? scratch.decays.data : nullptr,
              .stride = c.stride,
              .visible = 0},
             0, args.rows, c.data, [&] { streams.advance(); });
}

void load_keys(const LinearGradientArgs& args, const Scratch& scratch) {
  load_features(args, args.key, 0, scratch.keys);
  load_rows(args, args.value, 0, args.value_dim, nullptr, 1.0F, scratch.values);
}

// The weights of the rows and their gradients; divides by the weights what grad_out has been
// multiplied with, and adds to it what the weights give. grad_query holds grad_out S^T.
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
    float* const gradient = scratch.grad_query.row(i);
    const float kept = args.log_decay ? scratch.from_start[i] : 1.0F;
    float weight = sum_of(score, visible), along = dot(score, product, visible);
    if (state) {
      weight += kept * dot(query, sums, dim);
      along += dot(query, gradient, dim);
    }
    inverse[i] = weight == 0.0F ? 0.0F : 1.0F / weight;
    grad_weight[i] = -(along * inverse[i]) * inverse[i];
    const Vec factor = broadcast(inverse[i]), added = broadcast(grad_weight[i]);
    for (int64_t j = 0; j < visible; j += kLanes) {
      store(product + j, load(product + j) * factor + added);
    }
    decay_row(args, scratch, scratch.products, i);
    if (!state) continue;
    scale_row(gradient, width, inverse[i]);
    add_row(sums, width, kept * grad_weight[i], gradient);
  }
}

// gradient = grad_out S^T, decayed, plus products of the first num_keys(row) keys from each row on.
template <typename NumKeys>
void multiply_queries(const LinearGradientArgs& args, const Scratch& scratch, const float* state,
                      const NumKeys& num_keys, Streams& streams) {
  for (int64_t d = 0; d < args.key_dim; d += kPanel) {
    for_each_tile(args.rows, [&]<int kRows>(Rows<kRows>, int64_t row) {
      out_tile<kRows>({.query = scratch.grad_out.row(row),
                       .query_stride = scratch.grad_out.stride,
                       .dim = args.value_dim,
                       .state = state ? state + d * args.value_dim : nullptr,
                       .from_start = args.log_decay && state ? scratch.from_start + row : nullptr,
                       .scores = scratch.products.row(row),
                       .stride = scratch.products.stride,
                       .num_keys = num_keys(row + kRows),
                       .values = scratch.keys.data + d,
                       .values_stride = scratch.keys.stride},
                      scratch.grad_query.row(row) + d, scratch.grad_query.stride);
    });
    streams.advance();
  }
}

// gradient += products times keys.
template <int kRows>
__attribute__((noinline)) void add_tile(const float* products, int64_t stride, const float* keys,
                                        int64_t key_stride, int64_t depth, float* gradient) {
  multiply_tile<Products, true, kRows>(products, stride, keys, depth, gradient, key_stride,
                                       key_stride);
}

void differentiate_queries(const LinearGradientArgs& args, const Scratch& scratch,
                           const float* state, int64_t head, Streams& streams) {
  const int64_t rows = args.rows, dim = args.key_dim;
  const Matrix& gradient = scratch.grad_query;
  load_features(args, args.query, head, scratch.query);
  load_rows(args, args.grad_out, head, args.value_dim, nullptr, args.normalize ? 1.0F : args.scale,
            scratch.grad_out);
  ask_for_head(args, head, 1, head_steps(args), streams);
  multiply_below(args, scratch, scratch.grad_out, args.value_dim, scratch.values_packed, nullptr,
                 !args.normalize, scratch.products, streams);
  if (args.normalize) {
    multiply_below(args, scratch, scratch.query, dim, scratch.keys_packed, nullptr, true,
                   scratch.scores, streams);
    multiply_queries(args, scratch, state, [](int64_t) { return 0; }, streams);
    normalize_rows(args, scratch, state, head);
    for (int64_t d = 0; d < dim; d += kPanel) {
      for_each_tile(rows, [&]<int kRows>(Rows<kRows>, int64_t row) {
        add_tile<kRows>(scratch.products.row(row), scratch.products.stride, scratch.keys.data + d,
                        scratch.keys.stride, row + kRows, gradient.row(row) + d);
      });
    }
  } else {
    multiply_queries(args, scratch, state, [](int64_t end) { return end; }, streams);
  }
  for (int64_t i = 0; args.flow && i < rows; ++i) {
    const float along = dot(scratch.query.row(i), gradient.row(i), dim);
    args.flow[i] = head == 0 ? along : args.flow[i] + along;
  }
  store_gradients(args, scratch, scratch.query, gradient, args.grad_query, head);
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

struct GradientOperands {
  const float* rows;  // of keys or values, which the adjoint is multiplied with
  int64_t rows_stride;
  int64_t dim;
  const float* adjoint;     // panel of it; null: 0, or in the gradient already
  const float* normalizer;  // of the adjoint; null: 0
  const float* to_end;      // null: 1
  bool accumulate;
  const float*
      factors;  // [heads of the block, rows, kRows]: of what queries give, from each row on
  int64_t stride;
  const float* queries;  // panel
  int64_t queries_stride;
  int64_t depth;      // rows of a head that see the first key
  int64_t head_rows;  // from a head's first row to that of the next
  int64_t heads;
};

// c = to_end (rows adjoint + normalizer) + factors^T queries, of one panel.
template <int kRows>
__attribute__((noinline)) void gradient_tile(const GradientOperands& x, float* c, int64_t ldc) {
  Vec acc[kRows][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) {
      acc[i][v] = x.accumulate   ? load(c + i * ldc + v * kLanes)
                  : x.normalizer ? load(x.normalizer + v * kLanes)
                                 : Vec{};
    }
  }
  if (x.adjoint) add_products<Products>(x.rows, x.rows_stride, x.adjoint, kPanel, x.dim, acc);
  if (x.to_end) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec kept = broadcast(x.to_end[i]);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) acc[i][v] *= kept;
    }
  }
  for (int64_t h = 0; h < x.heads; ++h) {
    add_products<Products, /*kTransposed=*/true>(x.factors + h * x.head_rows * x.stride, x.stride,
                                                 x.queries + h * x.head_rows * x.queries_stride,
                                                 x.queries_stride, x.depth, acc);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

// Adds to the gradient of keys or values what a block of heads gives, and with the first one what
// the adjoint behind the chunk gives: `with` times it. factors: of the rows of the block.
void add_gradient(const LinearGradientArgs& args, const Scratch& scratch, const Block& block,
                  const Matrix& with, int64_t with_dim, const float* adjoint,
                  const float* normalizer, const Matrix& factors, const Matrix& queries,
                  int64_t dim, const Matrix& gradient, Streams& streams) {
  const bool first = block.first == 0;
  const float* const state = first ? adjoint : nullptr;
  for (int64_t d = 0; d < dim; d += kPanel) {
    for_each_tile(args.rows, [&]<int kRows>(Rows<kRows>, int64_t row) {
      gradient_tile<kRows>({.rows = with.row(row),
                            .rows_stride = with.stride,
                            .dim = with_dim,
                            .adjoint = state ? state + d * with_dim : nullptr,
                            .normalizer = state && normalizer ? normalizer + d : nullptr,
                            .to_end = state && args.log_decay ? scratch.to_end + row : nullptr,
                            .accumulate = !first,
                            .factors = factors.row(row) + row,
                            .stride = factors.stride,
                            .queries = queries.row(row) + d,
                            .queries_stride = queries.stride,
                            .depth = args.rows - row,
                            .head_rows = args.rows,
                            .heads = block.count},
                           gradient.row(row) + d, gradient.stride);
    });
    streams.advance();
  }
}

void differentiate_keys(const LinearGradientArgs& args, const Scratch& scratch, const Block& block,
                        const float* adjoint, Streams& streams) {
  const int64_t rows = args.rows, dim = args.key_dim, value_dim = args.value_dim;
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t head = block.first + i;
    ask_for_head(args, head, heads_of_block(rows), 2 * panels(rows), streams);
    multiply_below(args, scratch, of_head(args, scratch.query, i), dim, scratch.keys_packed,
                   nullptr, true, of_head(args, scratch.scores, i), streams);
    multiply_below(args, scratch, of_head(args, scratch.grad_out, i), value_dim,
                   scratch.values_packed,
                   args.normalize ? args.grad_weight + head * args.weight_head_stride : nullptr,
                   true, of_head(args, scratch.products, i), streams);
  }
  if (adjoint && block.first == 0) transpose_state(adjoint, dim, value_dim, scratch.transposed);
  add_gradient(args, scratch, block, scratch.values, value_dim, adjoint,
               adjoint && args.normalize ? normalizer_of(adjoint, args) : nullptr, scratch.products,
               scratch.query, dim, scratch.grad_key, streams);
  add_gradient(args, scratch, block, scratch.keys, dim, adjoint ? scratch.transposed : nullptr,
               nullptr, scratch.scores, scratch.grad_out, value_dim, scratch.grad_value, streams);
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
  Streams streams;
  const float total = fill_ends(args, scratch);
  for_each_block(args, [&](const Block& block) {
    load_block(args, scratch, block);
    ask_for_head(args, block.first, heads_of_block(args.rows), panels(args.key_dim), streams);
    add_queries(args, scratch, block, total, streams);
  });
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
  const float* const state =
      state_before(args, state_floats(args.key_dim, args.value_dim), scratch.state);
  for (int64_t head = 0; head < args.heads; ++head) {
    differentiate_queries(args, scratch, state, head, streams);
  }
  add_keys(args, scratch, total, streams);
  if (args.past_caches) stream_end();
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
  const float* const adjoint =
      state_before(args, state_floats(args.key_dim, args.value_dim), scratch.state);
  for_each_block(args, [&](const Block& block) {
    load_block(args, scratch, block);
    differentiate_keys(args, scratch, block, adjoint, streams);
    add_queries(args, scratch, block, total, streams);
  });
  for (int64_t j = 0; args.flow && j < args.rows; ++j) {
    args.flow[j] -= dot(scratch.keys.row(j), scratch.grad_key.row(j), args.key_dim);
  }
  store_gradients(args, scratch, scratch.keys, scratch.grad_key, args.grad_key, 0);
  for (int64_t j = 0; j < args.rows; ++j) {
    write_row(scratch.grad_value.row(j), args.value_dim, 1.0F, args.grad_value.data, args.dtype,
              j * args.grad_value.stride, args.past_caches, scratch.row);
  }
  if (args.past_caches) stream_end();
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
