// The matrix product that all attention kernels are built on, and its tile sizes.
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

// The least multiple that is not less than n.
H2O_INLINE int64_t pad_to(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Score rows are this much longer than their keys, so that the rows of a tile do not share cache
// sets.
constexpr int64_t kRowGap = 16;

H2O_INLINE int64_t score_stride(int64_t count) { return pad_to(count, kPanel) + kRowGap; }

// acc += a[kRows, depth] b[depth, kVectors kLanes]. a and b hold words; rows of b are kPanel apart.
template <typename Products, int kRows, int kVectors>
H2O_INLINE void add_products(const float* a, int64_t lda, const float* b, int64_t depth,
                             Vec (&acc)[kRows][kVectors]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) row[v] = load(b + k * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec value = broadcast(a[i * lda + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        acc[i][v] = Products::multiply_add(value, row[v], acc[i][v]);
    }
  }
}

// Stores a tile in rows that are ldc apart.
template <int kRows>
H2O_INLINE void store_tile(const Vec (&tile)[kRows][kTileVectors], float* c, int64_t ldc) {
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(c + i * ldc + v * kLanes, tile[i][v]);
  }
}

// c[kRows, kPanel] (+)= a[kRows, depth] b[depth, kPanel]. a and b hold words, c floats.
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
  add_products<Products>(a, lda, b, depth, acc);
  store_tile(acc, c, ldc);
}

// Where the rows of a matrix of probabilities end: row r is zero from key limits[r] on, the limits
// never falling; its columns begin at word `first`. limits null: nothing is known to be zero.
struct RowEnds {
  const int32_t* limits;
  int64_t first;

  // Words, of `depth`, after which `rows` rows from `row` on are zero.
  template <typename Products>
  H2O_INLINE int64_t depth_of(int row, int rows, int64_t depth) const {
    if (!limits) return depth;
    const int64_t end = words_of<Products>(limits[row + rows - 1]) - first;
    return end < 0 ? 0 : (end < depth ? end : depth);
  }
};

// The same for any number of rows: whole tiles, then the rest. Tiles skip zeros of a.
template <typename Products, bool kAccumulate>
H2O_INLINE void multiply_rows(const float* a, int64_t lda, int rows, const RowEnds& ends,
                              const float* b, int64_t depth, float* c, int64_t ldc) {
  static_assert(kTileRows <= 8, "the rest of a tile is taken as 4 + 2 + 1 rows");
  int row = 0;
#define H2O_TILE(n)                        \
  multiply_tile<Products, kAccumulate, n>( \
      a + row * lda, lda, b, ends.depth_of<Products>(row, n, depth), c + row * ldc, ldc)
  for (; row + kTileRows <= rows; row += kTileRows) H2O_TILE(kTileRows);
  const int rest = rows - row;
  if (rest & 4) H2O_TILE(4), row += 4;
  if (rest & 2) H2O_TILE(2), row += 2;
  if (rest & 1) H2O_TILE(1);
#undef H2O_TILE
}

}  // namespace h2o_prefill::H2O_ISA
