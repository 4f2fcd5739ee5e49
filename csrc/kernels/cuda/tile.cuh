// Tiles of rows in shared memory: loading them from tensors, and the products of one warp.
//
// A tile of kRows rows of kUnits units (layout.h) is row-major and swizzled. Row numbers that are
// added to a lane's own row are multiples of 8, so that the swizzle depends on the lane alone and a
// constant is added to its address.
#pragma once

#include "kernels/cuda/layout.h"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill::tile {

// Threads of every block that works on tiles.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

constexpr int kUnitElements = layout::kUnitElements;

struct alignas(layout::kUnitBytes) Unit {
  uint32_t words[4];
};

// x itself, as a value that the compiler knows nothing about, so that a loop computes addresses
// from it anew: the registers that it would take to keep them are accumulators.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// First element of row t of head h of batch row b.
template <typename T>
__device__ __forceinline__ T* row_pointer(const HeadsView& view, int64_t b, int64_t h, int64_t t) {
  return static_cast<T*>(view.data) + b * view.stride_batch + h * view.stride_head +
         t * view.stride_row;
}

// Whether a position, as lists have it, is one of the tensor's rows: -1 is none, and neither is a
// position that a caller should not have listed.
__device__ __forceinline__ bool is_row_of(const HeadsView& view, int32_t position) {
  return static_cast<uint32_t>(position) < static_cast<uint32_t>(view.length);
}

// The rows of one head.
struct HeadRows {
  const uint16_t* data;
  int64_t stride;  // elements
  int units;       // of a row; a tile's further ones are zeros
};

__device__ __forceinline__ HeadRows head_rows(const HeadsView& view, int64_t b, int64_t h,
                                              int64_t first) {
  return {row_pointer<const uint16_t>(view, b, h, first), view.stride_row,
          static_cast<int>(view.dim) / kUnitElements};
}

// Element of a tile where a unit begins.
template <int kUnits>
__device__ __forceinline__ int element_of(int row, int unit) {
  return layout::swizzle(row, unit, kUnits) * kUnitElements;
}

// Where a lane's row begins, and element_of() of units `unit` + even numbers from there: the
// swizzle is an exclusive or, so that even units are exchanged with even ones.
template <int kUnits>
struct LaneRow {
  int row;
  int first;

  __device__ __forceinline__ LaneRow(int row_of_lane, int unit)
      : row(row_of_lane * kUnits * kUnitElements),
        first(element_of<kUnits>(row_of_lane, unit) - row) {}
  // The same for the row that is 8 n rows below.
  __device__ __forceinline__ int element(int even_unit, int n = 0) const {
    return row + (first ^ even_unit * kUnitElements) + n * 8 * kUnits * kUnitElements;
  }
};

// Begins to copy rows row_of(0 .. kRows - 1) to a tile, by all threads of the block: 128 or 64
// bytes of a row at a time. Zeros where row_of is negative and after the end of rows.
template <int kRows, int kUnits, typename RowOf>
__device__ __forceinline__ void load(uint16_t* tile, const HeadRows& rows, const RowOf& row_of) {
  constexpr int kPassUnits = kUnits % 8 == 0 ? 8 : 4;
  constexpr int kPassRows = kThreads / kPassUnits;
  static_assert(kRows % kPassRows == 0 && kPassRows % 8 == 0 && kUnits % kPassUnits == 0);
  const int thread = recomputed(static_cast<int>(threadIdx.x));
  const int unit = thread % kPassUnits;
  const int row = thread / kPassUnits;
#pragma unroll
  for (int r = 0; r < kRows; r += kPassRows) {
    const int64_t from = row_of(row + r);
    const uint16_t* source = rows.data + (from < 0 ? 0 : from * rows.stride);
#pragma unroll
    for (int u = 0; u < kUnits; u += kPassUnits) {
      const bool valid = from >= 0 && unit + u < rows.units;
      ptx::cp_async_16(tile + element_of<kUnits>(row, unit + u) + r * kUnits * kUnitElements,
                       source + (valid ? (unit + u) * kUnitElements : 0), valid);
    }
  }
}

// The a fragments of rows [16 m, 16 m + 16), m < kM, of `tile`, columns [16 k, 16 k + 16). `lanes`:
// of load_a_row, load_a_unit.
template <int kUnits, int kM>
__device__ __forceinline__ void load_a(uint32_t (&a)[kM][4], const uint16_t* tile,
                                       const LaneRow<kUnits>& lanes, int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], tile + lanes.element(2 * k, 2 * m));
}

// c[m] += a[m] b for two b fragments side by side, c[.][n] and c[.][n + 1].
template <DType dtype, int kM, int kN>
__device__ __forceinline__ void multiply_pair(float (&c)[kM][kN][4], int n,
                                              const uint32_t (&a)[kM][4], const uint32_t (&b)[4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    ptx::mma_m16n8k16<dtype>(c[m][n], a[m], b[0], b[1]);
    ptx::mma_m16n8k16<dtype>(c[m][n + 1], a[m], b[2], b[3]);
  }
}

// c = A B^T of one warp: rows [0, 16 kM) of tile `a`, rows [0, 8 kN) of tile `b`.
template <DType dtype, int kUnits, int kM, int kN>
__device__ __forceinline__ void multiply_transposed(float (&c)[kM][kN][4], const uint16_t* a,
                                                    const uint16_t* b, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0F;
    }
  }
  const LaneRow<kUnits> a_lanes(layout::load_a_row(lane), layout::load_a_unit(lane));
  const LaneRow<kUnits> b_lanes(layout::load_b_row(lane), layout::load_b_unit(lane));
#pragma unroll
  for (int k = 0; k < kUnits / 2; ++k) {
    uint32_t fa[kM][4];
    load_a(fa, a, a_lanes, k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t fb[4];
      ptx::ldmatrix_x4(fb, b + b_lanes.element(2 * k, n));
      multiply_pair<dtype>(c, n, fa, fb);
    }
  }
}

// c += P V of one warp: p are accumulators of 16 kM rows and 8 kKeyTiles keys, rounded to the dtype
// here; `v` has the keys as rows and 8 kN columns.
template <DType dtype, int kUnits, int kM, int kN, int kKeyTiles>
__device__ __forceinline__ void multiply_rounded(float (&c)[kM][kN][4],
                                                 const float (&p)[kM][kKeyTiles][4],
                                                 const uint16_t* v, int lane) {
  static_assert(kN == kUnits && kKeyTiles % 2 == 0);
  const LaneRow<kUnits> lanes(layout::load_b_transposed_row(lane),
                              layout::load_b_transposed_unit(lane));
#pragma unroll
  for (int k = 0; k < kKeyTiles; k += 2) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = p[m][k + i / 2];
        a[m][i] = ptx::pack_pair<dtype>(from[2 * (i % 2)], from[2 * (i % 2) + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_transposed(b, v + lanes.element(n, k));
      multiply_pair<dtype>(c, n, a, b);
    }
  }
}

// Turns accumulators x into tanh(x scale), as capped logits begin.
template <int kM, int kN>
__device__ __forceinline__ void cap(float (&c)[kM][kN][4], float scale) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = tanhf(c[m][n][i] * scale);
    }
  }
}

}  // namespace h2o_prefill::tile
