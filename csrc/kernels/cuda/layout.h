// Where things lie: units of 16 bytes in shared tiles, and matrix elements in the registers of a
// warp. Plain functions of integers, so that the host can test them.
//
// Fragments belong to mma m16n8k16: a[16, 16], b[16, 8] and c[16, 8]. Element i of a lane is,
// for a and b, half i % 2 of register i / 2 and, for c, register i.
#pragma once

#ifdef __CUDACC__
#define H2O_LAYOUT __host__ __device__ __forceinline__ constexpr
#else
#define H2O_LAYOUT constexpr
#endif

namespace h2o_prefill::layout {

// Bytes of a unit, and 16-bit elements in it.
constexpr int kUnitBytes = 16;
constexpr int kUnitElements = 8;

// Index of a unit in a row-major tile whose rows have row_units units, a multiple of 4.
//
// Within a row, units are exchanged so that the same column of 8 consecutive rows lies in 8
// different groups of 4 banks: ldmatrix reads each of its matrices without conflict. Rows of 8n
// units begin at the same bank, so 3 bits of the column are XORed with the row; rows of 8n + 4 do
// every second time, so 2 bits are XORed with half the row.
H2O_LAYOUT int swizzle(int row, int unit, int row_units) {
  return row * row_units + (unit ^ (row_units % 8 == 0 ? row % 8 : row / 2 % 4));
}

// Element i of 4 of the accumulator c. Two accumulators side by side, rounded and packed in pairs,
// are an a fragment: {c[0..1], c[2..3]} of the left one, then of the right one.
H2O_LAYOUT int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
H2O_LAYOUT int accumulator_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// The row and unit that a lane names to ldmatrix_x4 for a[16, 16] stored by rows.
H2O_LAYOUT int load_a_row(int lane) { return lane % 16; }
H2O_LAYOUT int load_a_unit(int lane) { return lane / 16; }

// The same for two b fragments, registers {b0, b1} of columns 0..7 and then of columns 8..15,
// stored by columns: row n of the tile is column n of b, as keys are for Q K^T.
H2O_LAYOUT int load_b_row(int lane) { return lane % 8 + lane / 16 * 8; }
H2O_LAYOUT int load_b_unit(int lane) { return lane / 8 % 2; }

// The same for two b fragments stored by rows, as values are for P V, by ldmatrix_x4_transposed.
H2O_LAYOUT int load_b_transposed_row(int lane) { return lane % 16; }
H2O_LAYOUT int load_b_transposed_unit(int lane) { return lane / 16; }

}  // namespace h2o_prefill::layout

#undef H2O_LAYOUT
