#include "kernels/cuda/column_sums_sm90.h"

#include "kernels/cuda/column_sums_launch.cuh"
#include "kernels/cuda/column_sums_sm90.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/dims_sm90.h"
#include "kernels/cuda/dispatch.h"

namespace h2o_prefill {
namespace {

// One block an SM.
constexpr column_sums::TileSizes kTileSizes{.keys = column_sums_sm90::kKeys,
                                            .rows = column_sums_sm90::kRows,
                                            .many_blocks = 128,
                                            .part_rows = 2 * column_sums_sm90::kRows};

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_tiles(const ColumnSumsParams& params, cudaStream_t stream) {
  using Shared = typename column_sums_sm90::Shape<kDim>::Shared;
  int multiprocessors = INT32_MAX;
  if constexpr (kGathered) {
    const cudaError_t error = count_multiprocessors(multiprocessors);
    if (error != cudaSuccess) return error;
  }
  return column_sums::launch_grid<kGathered>(
      &column_sums_sm90::column_sums_sm90_kernel<dtype, kDim, kGathered>, sm90::kThreads,
      sm90::shared_bytes<Shared>(),
      column_sums::divide(params, kTileSizes, params.partial != nullptr), stream, multiprocessors);
}

}  // namespace

bool has_column_sums_sm90(const ColumnSumsParams& params) {
  return params.query.dtype != DType::kFloat32 && has_rows_of_sm90(params.key.dim) &&
         params.cap_scale == 0.0F;
}

column_sums::Grid divide_column_sums_sm90(const ColumnSumsParams& params) {
  return column_sums::divide(params, kTileSizes, /*may_share=*/true);
}

cudaError_t launch_column_sums_sm90(const ColumnSumsParams& params, cudaStream_t stream) {
  if (!has_column_sums_sm90(params)) return cudaErrorInvalidValue;
  return with_kind(params.gathered, [&](auto gathered) {
    return with_half_dtype(params.query.dtype, [&](auto dtype) {
      return with_padded_dim<64, 128>(params.key.dim, [&](auto padded) {
        return launch_tiles<dtype(), padded(), gathered()>(params, stream);
      });
    });
  });
}

}  // namespace h2o_prefill
