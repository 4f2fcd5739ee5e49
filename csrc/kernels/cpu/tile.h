// The matrix product that all attention work is made of, and its tile sizes.
#pragma once

#include "kernels/cpu/products.h"

namespace h2o_prefill::H2O_ISA {

// Columns of a tile: two vectors, so that each broadcast query value feeds two fused multiply-adds.
constexpr int kTileVectors = 2;
constexpr int kPanel = kTileVectors * kLanes;

// Query rows that go through QK^T, softmax and PV together. With 1024 keys their logits take 128
// KiB: inside L2, beside the packed keys. A multiple of kTileRows.
constexpr int kRowBlock = 32 / kTileRows * kTileRows + (32 % kTileRows ? kTileRows : 0);

// Words of keys of one PV pass: kRowBlock probabilities and a panel of values of this depth stay in
// L1.
constexpr int kKeyWords = 128;

// c[kRows, kPanel] (+)= a[kRows, depth] b[depth, kPanel]. a and b hold words, c floats; b is dense.
template <typename Products, bool kAccumulate, int kRows>
H2O_INLINE void multiply_tile(const float* a, int64_t lda, const float* b, int64_t depth, float* c,
                              int64_t ldc) {
  Vec acc[kRows][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v)
      acc[i][v] = kAccumulate ? load(c + i * ldc + v * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b0 = load(b + k * kPanel);
    const Vec b1 = load(b + k * kPanel + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec value = broadcast(a[i * lda + k]);
      acc[i][0] = Products::multiply_add(value, b0, acc[i][0]);
      acc[i][1] = Products::multiply_add(value, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

// The same for any number of rows: whole tiles, then what is left.
template <typename Products, bool kAccumulate>
void multiply_rows(const float* a, int64_t lda, int rows, const float* b, int64_t depth, float* c,
                   int64_t ldc) {
  static_assert(kTileRows <= 8, "the rest of a tile is taken as 4 + 2 + 1 rows");
  for (; rows >= kTileRows; rows -= kTileRows, a += kTileRows * lda, c += kTileRows * ldc)
    multiply_tile<Products, kAccumulate, kTileRows>(a, lda, b, depth, c, ldc);
  if (rows & 4) {
    multiply_tile<Products, kAccumulate, 4>(a, lda, b, depth, c, ldc);
    a += 4 * lda, c += 4 * ldc;
  }
  if (rows & 2) {
    multiply_tile<Products, kAccumulate, 2>(a, lda, b, depth, c, ldc);
    a += 2 * lda, c += 2 * ldc;
  }
  if (rows & 1) multiply_tile<Products, kAccumulate, 1>(a, lda, b, depth, c, ldc);
}

}  // namespace h2o_prefill::H2O_ISA
