// Linear attention token by token: each token reads the state once, adds its own outer product, and
// multiplies its queries with the updated state. A chunk would pack the state and multiply tiles
// that are mostly padding.
#include "kernels/cpu/linear_rows.h"
#include "kernels/cpu/row_io.h"

namespace h2o_prefill::H2O_ISA {
namespace {

struct Scratch {
  float* keys;     // features [row][dim]
  float* queries;  // features [row][head][dim]
  float* values;   // [row][value dim]
  float* sums;     // [row][head][value dim]
  int64_t dim;     // of rows, padded to vectors
  int64_t width;   // of rows of values
  int64_t floats;  // size of the whole scratch

  // first: null to compute only `floats`.
  Scratch(float* first, int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads)
      : dim(pad_to(key_dim, kLanes)), width(pad_to(value_dim, kLanes)), floats(0) {
    const auto take = [&](int64_t count) {
      float* const part = first ? first + floats : nullptr;
      floats += whole_lines(count);
      return part;
    };
    keys = take(rows * dim);
    queries = take(rows * heads * dim);
    values = take(rows * width);
    sums = take(rows * heads * width);
  }
};

// Loads the features of a row of queries or keys.
void load_features(const LinearChunkArgs& args, const void* data, int64_t offset, float* row) {
  for (int64_t i = args.key_dim; i < pad_to(args.key_dim, kLanes); ++i) row[i] = 0.0F;
  load_floats(data, args.dtype, offset, args.key_dim, 1.0F, row);
  map_features(args.feature_map, pad_to(args.key_dim, kLanes), row);
}

// The first n lanes, the others 0.
H2O_INLINE Vec load_part(const float* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

H2O_INLINE void store_part(float* p, int64_t n, Vec x) {
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}

// Columns of the state, [dim, stride] in memory, with the matching parts of the value row and of
// the sums.
struct Columns {
  const float* from;  // before the token
  float* to;          // after it
  int64_t stride;
  int64_t last;  // columns in the last vector
  int64_t dim;
};

// to = decay * from + key value; without kUpdate `to` holds that already. sums = queries * to.
template <int kVectors, int kHeads, bool kUpdate>
__attribute__((noinline)) void sweep(const Columns& x, float decay, const float* key,
                                     const float* value, const float* queries, int64_t query_stride,
                                     float* sums, int64_t sum_stride) {
  Vec acc[kHeads][kVectors], values[kVectors];
  const Vec factor = broadcast(decay);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    values[v] = load(value + v * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) acc[h][v] = Vec{};
  }
  const bool is_whole = x.last == kLanes;
  for (int64_t d = 0; d < x.dim; ++d) {
    const float* const from = (kUpdate ? x.from : x.to) + d * x.stride;
    const Vec feature = broadcast(key[d]);
    Vec state[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const bool is_part = v + 1 == kVectors && !is_whole;
      state[v] = is_part ? load_part(from + v * kLanes, x.last) : load(from + v * kLanes);
      if (!kUpdate) continue;
      state[v] = state[v] * factor + feature * values[v];
      float* const to = x.to + d * x.stride + v * kLanes;
      is_part ? store_part(to, x.last, state[v]) : store(to, state[v]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Vec query = broadcast(queries[h * query_stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[h][v] = query * state[v] + acc[h][v];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + h * sum_stride + v * kLanes, acc[h][v]);
  }
}

// Processes all query heads of a token. `value` and `sums` begin at the first of the columns.
template <int kVectors>
void attend_token(const Columns& x, const Scratch& scratch, float decay, const float* key,
                  const float* value, const float* queries, float* sums, int64_t heads) {
  const auto run = [&](auto* with, int64_t head) {
    with(x, decay, key, value, queries + head * scratch.dim, scratch.dim,
         sums + head * scratch.width, scratch.width);
  };
  const int64_t first = heads & 3 ? heads & 3 : 4;
  if (first == 4) run(sweep<kVectors, 4, true>, 0);
  if (first == 3) run(sweep<kVectors, 3, true>, 0);
  if (first == 2) run(sweep<kVectors, 2, true>, 0);
  if (first == 1) run(sweep<kVectors, 1, true>, 0);
  for (int64_t head = first; head < heads; head += 4) run(sweep<kVectors, 4, false>, head);
}

// Writes the outputs of a token; `normalizer` is the one after it.
void write_token(const LinearChunkArgs& args, const Scratch& scratch, int64_t row,
                 const float* normalizer) {
  for (int64_t head = 0; head < args.heads; ++head) {
    const int64_t i = row * args.heads + head;
    float factor = args.scale;
    if (args.normalize) {
      const float weight = dot(scratch.queries + i * scratch.dim, normalizer, args.key_dim);
      factor = weight == 0.0F ? 0.0F : 1.0F / weight;
    }
    store_floats(scratch.sums + i * scratch.width, args.value_dim, factor, args.out.data,
                 args.out_dtype, head * args.out.head_stride + row * args.out.stride);
  }
}

}  // namespace

void linear_tokens(const LinearChunkArgs& args, const LinearStates& states) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows, args.heads);
  for (int64_t row = 0; row < args.rows; ++row) {
    load_features(args, args.key.data, row * args.key.stride, scratch.keys + row * scratch.dim);
    load_floats(args.value.data, args.dtype, row * args.value.stride, args.value_dim, 1.0F,
                scratch.values + row * scratch.width);
    for (int64_t i = args.value_dim; i < scratch.width; ++i) {
      scratch.values[row * scratch.width + i] = 0.0F;
    }
    for (int64_t head = 0; head < args.heads; ++head) {
      load_features(args, args.query.data, head * args.query.head_stride + row * args.query.stride,
                    scratch.queries + (row * args.heads + head) * scratch.dim);
    }
  }
  const auto decay_at = [&](int64_t row) {
    return args.log_decay ? exp_nonpositive(args.log_decay[row * args.decay_stride]) : 1.0F;
  };
  if (!states.state) {
    for (int64_t i = 0; i < args.key_dim * args.value_dim; ++i) states.last_state[i] = 0.0F;
  }
  constexpr int64_t kColumns = 4 * kLanes;
  for (int64_t column = 0; column < args.value_dim;) {
    const int64_t left = args.value_dim - column;
    const int64_t vectors = left >= kColumns ? 4 : left > kLanes ? 2 : 1;
    const int64_t columns = left < vectors * kLanes ? left : vectors * kLanes;
    for (int64_t row = 0; row < args.rows; ++row) {
      const float* const before = row == 0 && states.state ? states.state : states.last_state;
      const Columns x{.from = before + column,
                      .to = states.last_state + column,
                      .stride = args.value_dim,
                      .last = columns - (vectors - 1) * kLanes,
                      .dim = args.key_dim};
      (vectors == 4 ? attend_token<4>
       : vectors == 2
           ? attend_token<2>
           : attend_token<1>)(x, scratch, decay_at(row), scratch.keys + row * scratch.dim,
                              scratch.values + row * scratch.width + column,
                              scratch.queries + row * args.heads * scratch.dim,
                              scratch.sums + row * args.heads * scratch.width + column, args.heads);
    }
    column += columns;
  }
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const before = row > 0 ? states.last_normalizer : states.normalizer;
    const float decay = decay_at(row);
    for (int64_t d = 0; args.normalize && d < args.key_dim; ++d) {
      const float earlier = before ? decay * before[d] : 0.0F;
      states.last_normalizer[d] = earlier + scratch.keys[row * scratch.dim + d];
    }
    write_token(args, scratch, row, states.last_normalizer);
  }
}

int64_t token_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads) {
  return Scratch(nullptr, key_dim, value_dim, rows, heads).floats;
}

}  // namespace h2o_prefill::H2O_ISA
