// Where wgmma finds its operands in shared memory and leaves its result. Plain functions of
// integers, so that the host can test them.
//
// Operands A[64, 16] and B[16, N] of S = Q K^T lie by rows of A and by columns of B ("K-major"):
// keys and queries as they come, head_dim along a row. A slab is such a matrix of 64 columns, rows
// of 128 bytes. Its units of 16 bytes are exchanged within each group of 8 rows, which begins at a
// multiple of 1024 bytes: the hardware XORs bits 4..6 of every address with its bits 7..9. A wider
// matrix is several slabs, one after the other.
#pragma once

#include <cstdint>

#include "kernels/cuda/layout.h"

#ifdef __CUDACC__
#define H2O_LAYOUT __host__ __device__ __forceinline__ constexpr
#else
#define H2O_LAYOUT constexpr
#endif

namespace h2o_prefill::layout_sm90 {

constexpr int kWarpgroupThreads = 128;

// The operand of an address's XOR, as descriptors name it: nothing, or 1 to 3 of its bits from 7
// on, moved to bit 4. Rows of 16, 32, 64 or 128 bytes are free of bank conflicts then.
enum class Swizzle : uint32_t { kNone = 0, k128Bytes = 1, k64Bytes = 2, k32Bytes = 3 };

constexpr int kSlabColumns = 64;
constexpr int kSlabUnits = kSlabColumns / layout::kUnitElements;
constexpr int kSlabRowBytes = kSlabUnits * layout::kUnitBytes;
constexpr int kSlabGroupBytes = 8 * kSlabRowBytes;  // of 8 rows; a slab is aligned to it

// Matrix descriptor of an operand:
//   bits  0..13  address in shared memory / 16
//   bits 16..29  leading byte offset / 16: K-major, between the two units of a row, without a
//                swizzle only
//   bits 32..45  stride byte offset / 16: between groups of 8 rows
//   bits 49..51  0, since groups begin at multiples of their size
//   bits 62..63  swizzle
H2O_LAYOUT uint64_t make_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes,
                                    Swizzle swizzle) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3FFFF) >> 4); };
  return field(address) | field(leading_bytes) << 16 | field(stride_bytes) << 32 |
         static_cast<uint64_t>(swizzle) << 62;
}

// The descriptor of the rows of a slab that begin at `address`, a multiple of kSlabGroupBytes.
H2O_LAYOUT uint64_t slab_descriptor(uint32_t address) {
  return make_descriptor(address, layout::kUnitBytes, kSlabGroupBytes, Swizzle::k128Bytes);
}

// Offset from the descriptor of the first columns of slabs with `rows` rows for columns
// [16 step, 16 step + 16).
H2O_LAYOUT uint64_t descriptor_step(int step, int rows) {
  constexpr int kSteps = kSlabColumns / 16;
  const int bytes = step / kSteps * rows * kSlabRowBytes + step % kSteps * 2 * layout::kUnitBytes;
  return static_cast<uint64_t>(bytes) >> 4;
}

// The descriptor of slabs with `rows` rows that hold B[rows, N] by rows ("MN-major"): a key's value
// along a row, 16 keys to a product. Between 64 columns and the next 64 is the leading offset,
// between groups of 8 rows the stride.
H2O_LAYOUT uint64_t slab_rows_descriptor(uint32_t address, int rows) {
  return make_descriptor(address, static_cast<uint32_t>(rows * kSlabRowBytes), kSlabGroupBytes,
                         Swizzle::k128Bytes);
}

// Offset from it for rows [16 step, 16 step + 16).
H2O_LAYOUT uint64_t descriptor_row_step(int step) {
  return static_cast<uint64_t>(step * 16 * kSlabRowBytes) >> 4;
}

// Index of a unit in slabs with `rows` rows; within a slab layout::swizzle() gives it.
H2O_LAYOUT int slab_unit(int row, int unit, int rows) {
  return unit / kSlabUnits * rows * kSlabUnits +
         layout::swizzle(row, unit % kSlabUnits, kSlabUnits);
}

// Register i of N / 2 of the accumulator [64, N] in a thread of the warpgroup: accumulators of 8
// columns side by side, 16 rows a warp.
H2O_LAYOUT int accumulator_row(int thread, int i) {
  return thread / 32 * 16 + layout::accumulator_row(thread % 32, i % 4);
}
H2O_LAYOUT int accumulator_column(int thread, int i) {
  return i / 4 * 8 + layout::accumulator_column(thread % 32, i % 4);
}

}  // namespace h2o_prefill::layout_sm90

#undef H2O_LAYOUT
