// The backward pass of linear attention over one chunk. With features q and k, the gradient o of a
// row of the output, the state S before the chunk, its adjoint R after it, and decays D below the
// diagonal:
//   dq = o S^T + (o v^T . D) k        dk = v R^T + (o v^T . D)^T q
//                                     dv = k R   + (q k^T . D)^T o
// where S and R decay to the row. Compiled once per instruction set.
//
// The normaliser is one more column of values, all 1, whose output is the weight w of a row: its
// gradient, -(o . out) / w, is added to each product o v^T.
#include "kernels/cpu/linear_chunk_backward.h"

#include "kernels/cpu/linear_backward_rows.h"
#include "kernels/cpu/linear_backward_scratch.h"
#include "kernels/cpu/linear_backward_streams.h"
#include "kernels/cpu/linear_backward_tiles.h"

namespace h2o_prefill::H2O_ISA {
namespace {

// state = kept * state + values^T keys, over the given number of rows.
void add_to_state(const LinearBackwardArgs& args, const Matrix& values, const Matrix& keys,
                  int64_t rows, float kept, Streams& streams) {
  for (int64_t d = 0; d < args.key_dim; d += kPanel) {
    for_each_tile(args.value_dim, [&]<int kRows>(Rows<kRows>, int64_t row) {
      sum_tile<kRows>(values.data + row, values.stride, keys.data + d, keys.stride, rows, kept,
                      args.sum + d * args.value_dim + row * kPanel);
    });
    streams.advance();
  }
}

// Decay of the previous contents of `sum`; 0: there are none.
float kept_of_sum(const LinearBackwardArgs& args, float log_decay) {
  if (args.sum_is_zero) return 0.0F;
  return args.log_decay ? exp_nonpositive(log_decay) : 1.0F;
}

// Scales the normaliser of `sum`.
void decay_normalizer(const LinearBackwardArgs& args, float kept) {
  float* const sums = normalizer_of(args.sum, args);
  const int64_t floats =
      state_floats(args.key_dim, args.value_dim) - matrix_floats(args.key_dim, args.value_dim);
  if (kept == 0.0F) {
    fill(sums, 0, floats);
  } else {
    scale_row(sums, floats, kept);
  }
}

// Decays the keys, then adds values^T keys and the sum of the keys to the state.
void add_keys(const LinearBackwardArgs& args, const Scratch& scratch, float log_decay,
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

// Query heads [first, first + count), stacked in scratch.
struct Block {
  int64_t first;
  int64_t count;
};

// Decays grad_out, then adds grad_out^T query and the sum of queries times weight gradients to the
// adjoint.
void add_queries(const LinearBackwardArgs& args, const Scratch& scratch, const Block& block,
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

// Loads the query features, and output gradients divided by the weights of their rows.
void load_block(const LinearBackwardArgs& args, const Scratch& scratch, const Block& block) {
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t head = block.first + i;
    load_features(args, args.query, head, of_head(args, scratch.query, i));
    load_rows(args, args.grad_out, head, args.value_dim,
              args.normalize ? args.inverse + head * args.weight_head_stride : nullptr, args.scale,
              of_head(args, scratch.grad_out, i));
  }
}

template <typename Function>
void for_each_block(const LinearBackwardArgs& args, const Function& f) {
  const int64_t most = heads_of_block(args.rows);
  for (int64_t first = 0; first < args.heads; first += most) {
    f(Block{first, args.heads - first < most ? args.heads - first : most});
  }
}

// c = a b of one head, 0 above the diagonal. added: a term for each row's products; null: none.
void multiply_below(const LinearBackwardArgs& args, const Scratch& scratch, const Matrix& a,
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

void load_keys(const LinearBackwardArgs& args, const Scratch& scratch) {
  load_features(args, args.key, 0, scratch.keys);
  load_rows(args, args.value, 0, args.value_dim, nullptr, 1.0F, scratch.values);
}

// Computes the weights of the rows and their gradients. grad_query holds grad_out S^T on entry; it
// is divided by the weights, and the share of the weights is added.
void normalize_rows(const LinearBackwardArgs& args, const Scratch& scratch, const float* state,
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

// gradient = decayed grad_out S^T + products * keys, with the first num_keys(row) keys for the rows
// from `row` on.
template <typename NumKeys>
void multiply_queries(const LinearBackwardArgs& args, const Scratch& scratch, const float* state,
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

void differentiate_queries(const LinearBackwardArgs& args, const Scratch& scratch,
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

// Adds a block's share to the gradient of keys or values. The first block also adds the share of
// the adjoint after the chunk, `with` times it. factors: of the block's rows.
void add_gradient(const LinearBackwardArgs& args, const Scratch& scratch, const Block& block,
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

void differentiate_keys(const LinearBackwardArgs& args, const Scratch& scratch, const Block& block,
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

float add_state(const LinearBackwardArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  load_keys(args, scratch);
  const float total = fill_ends(args, scratch);
  add_keys(args, scratch, total, streams);
  return total;
}

float add_adjoint(const LinearBackwardArgs& args) {
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

// Loads keys, values and decays of the chunk; returns the log decay of the whole chunk.
float load_chunk(const LinearBackwardArgs& args, const Scratch& scratch, bool packs_keys) {
  load_keys(args, scratch);
  pack_columns(scratch.values, args.rows, args.value_dim, scratch.values_packed);
  if (packs_keys) pack_columns(scratch.keys, args.rows, args.key_dim, scratch.keys_packed);
  const float total = fill_ends(args, scratch);
  fill_decays(args, scratch);
  return total;
}

float walk_forward(const LinearBackwardArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  const float total = load_chunk(args, scratch, /*packs_keys=*/args.normalize);
  const float* const state =
      state_before(args, state_floats(args.key_dim, args.value_dim), scratch.state);
  for (int64_t head = 0; head < args.heads; ++head) {
    differentiate_queries(args, scratch, state, head, streams);
  }
  add_keys(args, scratch, total, streams);
  if (args.past_caches) stream_end();
  return total;
}

float walk_backward(const LinearBackwardArgs& args) {
  const Scratch scratch(args.scratch, args.key_dim, args.value_dim, args.rows);
  Streams streams = next_chunk(args);
  const float total = load_chunk(args, scratch, /*packs_keys=*/true);
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

extern const LinearBackwardKernels kLinearBackwardKernels;
const LinearBackwardKernels kLinearBackwardKernels = {add_state,     add_adjoint,  walk_forward,
                                                      walk_backward, pack_state,   unpack_state,
                                                      dot_states,    state_floats, scratch_floats};

}  // namespace h2o_prefill::H2O_ISA
