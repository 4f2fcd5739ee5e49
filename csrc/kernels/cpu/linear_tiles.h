// Tile products of linear attention.
#pragma once

#include "kernels/cpu/linear_rows.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {

// Calls f(Rows<n>{}, row) for whole tiles of rows, then for the remainder.
template <int n>
struct Rows {};

template <typename Function>
H2O_INLINE void for_each_tile(int64_t rows, const Function& f) {
  static_assert(kTileRows <= 8, "the rest of a tile is taken as 4 + 2 + 1 rows");
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) f(Rows<kTileRows>{}, row);
  const int64_t rest = rows - row;
  if (rest & 4) f(Rows<4>{}, row), row += 4;
  if (rest & 2) f(Rows<2>{}, row), row += 2;
  if (rest & 1) f(Rows<1>{}, row);
}

// The decayed sum of one panel; with decay 0 the sum is not read.
template <int kRows>
H2O_INLINE void load_decayed(const float* sum, float decay, Vec (&tile)[kRows][kTileVectors]) {
  const Vec factor = broadcast(decay);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v)
      tile[i][v] = decay == 0.0F ? Vec{} : load(sum + i * kPanel + v * kLanes) * factor;
  }
}

// Multiplies each row of a tile by its factor.
template <int kRows>
H2O_INLINE void scale_tile(const float* factors, Vec (&tile)[kRows][kTileVectors]) {
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const Vec factor = broadcast(factors[i]);
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) tile[i][v] *= factor;
  }
}

struct ScoreOperands {
  const float* query;  // dense rows
  int64_t dim;
  const float* keys;    // panel
  const float* decays;  // factors of the scores; null: 1
  int64_t stride;       // of decays and scores
};

// Scores of kRows rows with the first vectors of a panel of keys. The first row sees `visible` of
// them, each further row one more; the others get 0. Not inlined: the loops of several products in
// one function leave each too few registers.
template <int kVectors, int kRows>
__attribute__((noinline)) void score_tile(const ScoreOperands& s, int64_t visible, float* scores) {
  Vec acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[i][v] = Vec{};
  }
  add_products<Products>(s.query, s.dim, s.keys, s.dim, acc);
  const bool masked = visible < kVectors * kLanes;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const IntVec end = IntVec{} + static_cast<int32_t>(visible + i);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vec x = acc[i][v];
      if (s.decays) x *= load(s.decays + i * s.stride + v * kLanes);
      if (masked) x = lane_numbers() + v * kLanes < end ? x : Vec{};
      store(scores + i * s.stride + v * kLanes, x);
    }
  }
}

// The same for rows [0, rows) and all panels of keys up to the rows themselves; `s` of the first.
// Calls then() after each panel.
template <typename Then>
H2O_INLINE void score_rows(const ScoreOperands& s, int64_t first, int64_t rows, float* scores,
                           const Then& then) {
  for (int64_t j = 0; j < first + rows; j += kPanel) {
    for_each_tile(rows, [&]<int kRows>(Rows<kRows>, int64_t row) {
      const int64_t visible = first + row + 1 - j;
      if (visible + kRows <= 1) return;
      ScoreOperands of_tile = s;
      of_tile.query += row * s.dim;
      of_tile.keys += j * s.dim;
      if (s.decays) of_tile.decays += row * s.stride + j;
      float* const out = scores + row * s.stride + j;
      if (visible + kRows <= kLanes + 1) {
        score_tile<1, kRows>(of_tile, visible, out);
      } else {
        score_tile<kTileVectors, kRows>(of_tile, visible, out);
      }
    });
    then();
  }
}

struct OutOperands {
  const float* query;  // dense rows
  int64_t dim;
  const float* state;       // panel of it; null: 0
  const float* from_start;  // null: 1
  const float* scores;
  int64_t stride;
  int64_t num_keys;
  const float* values;  // panel
};

// c = from_start * (query state) + scores * values for one panel.
template <int kRows>
__attribute__((noinline)) void out_tile(const OutOperands& x, float* c, int64_t ldc) {
  Vec acc[kRows][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) acc[i][v] = Vec{};
  }
  if (x.state) add_products<Products>(x.query, x.dim, x.state, x.dim, acc);
  if (x.from_start) scale_tile(x.from_start, acc);
  add_products<Products>(x.scores, x.stride, x.values, x.num_keys, acc);
  store_tile(acc, c, ldc);
}

}  // namespace h2o_prefill::H2O_ISA
