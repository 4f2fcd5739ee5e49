#include "kernels/cuda/attend_forward.h"

#include <algorithm>

#include "kernels/cuda/attend_forward.cuh"
#include "kernels/cuda/attend_forward_float.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {
namespace {

using attend::KeyKind;

// A scale of 0 would make 0 times -inf of masked logits.
constexpr float kLeastScale = 1e-30F;

// Shared memory of a multiprocessor of 8.0, and how much of it each block takes besides its own.
constexpr int kSharedBytesOfA100 = 164 * 1024;
constexpr int kReservedBytes = 1024;

cudaError_t launch_blocks(void (*kernel)(attend::ForwardGrid), int shared_bytes,
                          const attend::ForwardGrid& grid, cudaStream_t stream) {
  if (grid.row_tiles() == 0) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(grid.row_tiles()), dim3(tile::kThreads), shared_bytes, stream, grid,
                /*overlapped=*/true);
}

template <DType dtype, int kDim, KeyKind kKind>
cudaError_t launch_tiles(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend::ForwardShape<kDim>;
  constexpr int kSharedBytes = Shape::shared_bytes(kKind == KeyKind::kGathered);
  static_assert(Shape::kBlocksPerSm * (kSharedBytes + kReservedBytes) <= kSharedBytesOfA100);
  attend::ForwardGrid grid = attend::grid_of(params, Shape::kRows, kKind == KeyKind::kGathered);
  float& scale = grid.params.scale_log2;
  grid.negate = scale < 0.0F;
  if (grid.negate) scale = -scale;
  if (scale == 0.0F) scale = kLeastScale;
  return launch_blocks(&attend::attend_forward_kernel<dtype, kDim, kKind>, kSharedBytes, grid,
                       stream);
}

template <KeyKind kKind>
cudaError_t launch_float(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend::FloatShape;
  if (std::max(params.key.dim, params.value.dim) > Shape::kMaxDim) return cudaErrorInvalidValue;
  const int shared_bytes =
      Shape::shared_bytes(static_cast<int>(params.key.dim), static_cast<int>(params.value.dim),
                          kKind == KeyKind::kGathered);
  return launch_blocks(&attend::attend_forward_float_kernel<kKind>, shared_bytes,
                       attend::grid_of(params, Shape::kRows), stream);
}

}  // namespace

cudaError_t launch_attend_forward(const AttendForwardParams& params, cudaStream_t stream) {
  if (params.rows.count == 0 || params.query.batch == 0 || params.query.heads == 0) {
    return cudaSuccess;
  }
  return attend::with_key_kind(params, [&](auto kind) {
    if (params.query.dtype == DType::kFloat32) return launch_float<kind()>(params, stream);
    return with_half_dtype(params.query.dtype, [&](auto dtype) {
      const int64_t dim = std::max(params.key.dim, params.value.dim);
      return with_padded_dim<64, 96, 128, 256>(dim, [&](auto padded) {
        return launch_tiles<dtype(), padded(), kind()>(params, stream);
      });
    });
  });
}

}  // namespace h2o_prefill
