// A thread lists a row.
#pragma once

#include "kernels/cuda/error_rows.h"
#include "kernels/host_device.h"

namespace h2o_prefill::error_rows {

constexpr int kListThreads = 256;

__global__ void __launch_bounds__(kListThreads)
    list_measured_kernel(__grid_constant__ const ListMeasuredParams p) {
  const int64_t size = p.measured.size();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x;
  if (i < p.heads * size) p.rows[i] = static_cast<int32_t>(p.measured.row(i % size));
  if (i < p.room) {
    const int64_t row = p.measured.row(i < size ? i : size - 1);
    p.limits[i] = static_cast<int32_t>(p.measured.past + row + 1);
  }
}

}  // namespace h2o_prefill::error_rows
