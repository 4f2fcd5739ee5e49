// Tile products of the backward pass of linear attention.
#pragma once

#include "kernels/cpu/linear_tiles.h"

namespace h2o_prefill::H2O_ISA {

// sum = kept * sum + a^T b for one panel. With kept 0, `sum` is not read.
template <int kRows>
__attribute__((noinline)) void sum_tile(const float* a, int64_t lda, const float* b, int64_t ldb,
                                        int64_t depth, float kept, float* sum) {
  Vec acc[kRows][kTileVectors];
  load_decayed(sum, kept, acc);
  add_products<Products, /*kTransposed=*/true>(a, lda, b, ldb, depth, acc);
  store_tile(acc, sum, kPanel);
}

// gradient += products * keys
template <int kRows>
__attribute__((noinline)) void add_tile(const float* products, int64_t stride, const float* keys,
                                        int64_t key_stride, int64_t depth, float* gradient) {
  multiply_tile<Products, true, kRows>(products, stride, keys, depth, gradient, key_stride,
                                       key_stride);
}

struct GradientOperands {
  const float* rows;  // rows of keys or values, which are multiplied by the adjoint
  int64_t rows_stride;
  int64_t dim;
  const float* adjoint;     // panel of it; null: zero, or already in the gradient
  const float* normalizer;  // of the adjoint; null: zero
  const float* to_end;      // null: 1
  bool accumulate;
  const float* factors;  // of the queries: [heads of the block, rows, kRows], from each row on
  int64_t stride;
  const float* queries;  // panel
  int64_t queries_stride;
  int64_t depth;      // rows of a head that see the first key
  int64_t head_rows;  // distance between the first rows of two heads
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
  if (x.to_end) scale_tile(x.to_end, acc);
  for (int64_t h = 0; h < x.heads; ++h) {
    add_products<Products, /*kTransposed=*/true>(x.factors + h * x.head_rows * x.stride, x.stride,
                                                 x.queries + h * x.head_rows * x.queries_stride,
                                                 x.queries_stride, x.depth, acc);
  }
  store_tile(acc, c, ldc);
}

// [panel over D][Dv][kPanel] as [panel over Dv][D][kPanel], 0 after the last value.
H2O_INLINE void transpose_state(const float* from, int64_t key_dim, int64_t value_dim, float* to) {
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

}  // namespace h2o_prefill::H2O_ISA
