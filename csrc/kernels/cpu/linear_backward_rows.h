// Loading, decaying and storing rows of a chunk in the backward pass of linear attention.
#pragma once

#include "kernels/cpu/linear_backward_scratch.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/row_io.h"

namespace h2o_prefill::H2O_ISA {

// Helpers for one row with padded columns.
H2O_INLINE void fill(float* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) row[i] = 0.0F;
}

H2O_INLINE void scale_row(float* row, int64_t n, float factor) {
  const Vec factors = broadcast(factor);
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(row + i) * factors);
}

// row += factor x
H2O_INLINE void add_row(const float* x, int64_t n, float factor, float* row) {
  const Vec factors = broadcast(factor);
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(x + i) * factors + load(row + i));
}

// Loads a head's rows as float32, with zeros in the padding. factors: one per row; null: `factor`
// for all rows.
H2O_INLINE void load_rows(const LinearBackwardArgs& args, const LinearRows& from, int64_t head,
                          int64_t dim, const float* factors, float factor, const Matrix& to) {
  for (int64_t i = 0; i < args.rows; ++i) {
    load_floats(from.data, args.dtype, head * from.head_stride + i * from.stride, dim,
                factors ? factors[i] : factor, to.row(i));
    fill(to.row(i), dim, pad_to(dim, kPanel));
  }
}

H2O_INLINE void load_features(const LinearBackwardArgs& args, const LinearRows& from, int64_t head,
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

H2O_INLINE void pack_columns(const Matrix& from, int64_t rows, int64_t dim, float* to) {
  pack_key_rows<Products>(pack_args(from.data, DType::kFloat32, from.stride, rows, dim, to));
}

// Stores the gradient of the inputs, given the gradient of their features.
H2O_INLINE void store_gradients(const LinearBackwardArgs& args, const Scratch& scratch,
                                const Matrix& features, const Matrix& gradient,
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
      // Up to an input x of 0 the feature is exp(x), which is its own derivative; above, the
      // derivative is 1.
      for (int64_t d = 0; d < args.key_dim; d += kLanes) {
        const Vec feature = load(x + d);
        store(row + d, load(row + d) * (feature > one ? one : feature));
      }
    }
    write_row(row, args.key_dim, 1.0F, to.data, args.dtype, head * to.head_stride + i * to.stride,
              args.past_caches, scratch.row);
  }
}

// Fills from_start and to_end; returns the log decay of the whole chunk.
H2O_INLINE float fill_ends(const LinearBackwardArgs& args, const Scratch& scratch) {
  if (!args.log_decay) return 0.0F;
  const int64_t padded = pad_to(args.rows, kPanel);
  fill_to_end(args.log_decay, args.decay_stride, args.rows, scratch.to_end);
  float total = 0.0F;
  for (int64_t i = 0; i < padded; ++i) {
    if (i < args.rows) total += args.log_decay[i * args.decay_stride];
    scratch.from_start[i] = total;
  }
  exponentiate(scratch.from_start, padded, scratch.from_start);
  return total;
}

// Fills the decays row by row: each row adds its own step to the log decays of the previous row.
H2O_INLINE void fill_decays(const LinearBackwardArgs& args, const Scratch& scratch) {
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

// Multiplies row i of a [rows, rows] product by the decays up to the row, and masks the keys after
// it.
H2O_INLINE void decay_row(const LinearBackwardArgs& args, const Scratch& scratch,
                          const Matrix& products, int64_t i) {
  float* const row = products.row(i);
  if (args.log_decay) {
    const float* const decays = scratch.decays.row(i);
    for (int64_t j = 0; j <= i; j += kLanes) store(row + j, load(row + j) * load(decays + j));
  }
  fill(row, i + 1, pad_to(args.rows, kPanel));
}

}  // namespace h2o_prefill::H2O_ISA
