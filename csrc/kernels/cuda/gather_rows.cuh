// Copies rows in the largest unit that all addresses are multiples of; a group of lanes a row.
#pragma once

#include "kernels/cuda/gather_rows.h"

namespace h2o_prefill::gather {

constexpr int kThreads = 256;

struct alignas(16) Unit16 {
  uint32_t words[4];
};

// The unit of a copy, and the lanes that share a row: a power of two up to 32.
struct Launch {
  GatherRowsParams p;
  int64_t row_units;
  int lanes;
};

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(__grid_constant__ const Launch launch) {
  const GatherRowsParams& p = launch.p;
  const int rows_of_cta = kThreads / launch.lanes;
  const int lane = static_cast<int>(threadIdx.x) % launch.lanes;
  const int row_of_cta = static_cast<int>(threadIdx.x) / launch.lanes;
  const uint32_t heads = static_cast<uint32_t>(p.heads);
  const uint32_t lists = static_cast<uint32_t>(p.batch) * heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_cta + row_of_cta;
  if (row >= p.count) return;
  for (uint32_t list = blockIdx.y; list < lists; list += gridDim.y) {
    const int64_t row_of_all = list * p.count + row;
    const int64_t index = p.indices[row_of_all];
    const bool present = index >= 0 && index < p.length;
    const Unit* from = reinterpret_cast<const Unit*>(
        static_cast<const char*>(p.from) + list / heads * p.stride_batch +
        list % heads * p.stride_head + index * p.stride_row);
    Unit* to = reinterpret_cast<Unit*>(static_cast<char*>(p.to) + row_of_all * p.row_bytes);
    for (int64_t unit = lane; unit < launch.row_units; unit += launch.lanes) {
      to[unit] = present ? from[unit] : Unit{};
    }
  }
}

}  // namespace h2o_prefill::gather
