// Adding up the sums that the blocks of a launch have shared.
#pragma once

#include "kernels/cuda/column_sums_grid.h"
#include "kernels/cuda/tile.cuh"

namespace h2o_prefill::column_sums {

// Row of the history of member i of a memory set; -1 where there is none.
__device__ __forceinline__ int row_of_member(const ColumnSumsParams& p, const int32_t* set, int i) {
  return tile::is_row_of(p.key, set[i]) ? set[i] : -1;
}

// Column `column` of unit `unit`: of the range of rows if causal, of the memory set if gathered.
template <bool kGathered>
__device__ __forceinline__ void store_sum(const ColumnSumsParams& p, int64_t unit, int column,
                                          float sum) {
  float* const sums = p.sums + unit * p.sums_stride;
  if constexpr (!kGathered) {
    sums[p.rows.position() + column] = sum;
  } else {
    const int position = row_of_member(p, p.memory.of_unit(unit), column);
    if (!p.scatter_add) {
      sums[column] = position < 0 ? 0.0F : sum;
    } else if (position >= 0) {
      sums[position] += sum;
    }
  }
}

// Adds up the parts of a column, query head by query head.
template <bool kGathered>
__device__ __forceinline__ void reduce_column(const Grid& grid, int64_t unit, int column) {
  const ColumnSumsParams& p = grid.params;
  const int64_t columns = kGathered ? p.memory.width : p.rows.count;
  const uint32_t parts = grid.head_parts * grid.row_parts;
  const float* part = p.partial + unit * parts * columns + column;
  // Tiles without members have no partial sums.
  const bool is_there = !kGathered || p.memory.of_unit(unit)[column] >= 0;
  float total = 0.0F;
  float of_head = 0.0F;
  uint32_t left = grid.row_parts;
#pragma unroll 8
  for (uint32_t i = 0; i < (is_there ? parts : 0); ++i, part += columns) {
    of_head += *part;
    if (--left > 0) continue;
    total = p.reduce_max ? fmaxf(total, of_head) : total + of_head;
    of_head = 0.0F;
    left = grid.row_parts;
  }
  store_sum<kGathered>(p, unit, column, total);
}

constexpr int kReduceThreads = 128;

// A thread has one column.
template <bool kGathered>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_partial_kernel(const __grid_constant__ Grid grid) {
  const ColumnSumsParams& p = grid.params;
  ptx::wait_for_earlier_launches();
  const int columns = static_cast<int>(kGathered ? p.memory.width : p.rows.count);
  const int column =
      static_cast<int>(blockIdx.x / grid.units) * kReduceThreads + static_cast<int>(threadIdx.x);
  if (column < columns) reduce_column<kGathered>(grid, blockIdx.x % grid.units, column);
}

}  // namespace h2o_prefill::column_sums
