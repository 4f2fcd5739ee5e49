#include "kernels/cuda/attend_forward.h"

#include "kernels/cuda/attend_forward.cuh"
#include "kernels/cuda/attend_forward_float.cuh"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {
namespace {

// A scale of 0 would make 0 times -inf of masked logits.
constexpr float kLeastScale = 1e-30F;

cudaError_t launch_blocks(void (*kernel)(attend::ForwardGrid), int shared_bytes,
                          const attend::ForwardGrid& grid, cudaStream_t stream) {
  if (grid.row_tiles() == 0) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(grid.row_tiles()), dim3(tile::kThreads), shared_bytes, stream, grid);
}

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_tiles(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend::ForwardShape<kDim>;
  attend::ForwardGrid grid = attend::grid_of(params, Shape::kRows);
  float& scale = grid.params.scale_log2;
  grid.negate = scale < 0.0F;
  if (grid.negate) scale = -scale;
  if (scale == 0.0F) scale = kLeastScale;
  return launch_blocks(&attend::attend_forward_kernel<dtype, kDim, kGathered>,
                       Shape::shared_bytes(kGathered), grid, stream);
}

template <DType dtype, int kDim>
cudaError_t launch_keys(const AttendForwardParams& params, cudaStream_t stream) {
  return params.gathered ? launch_tiles<dtype, kDim, true>(params, stream)
                         : launch_tiles<dtype, kDim, false>(params, stream);
}

template <DType dtype>
cudaError_t launch_dims(const AttendForwardParams& params, cudaStream_t stream) {
  const int64_t dim = params.key.dim > params.value.dim ? params.key.dim : params.value.dim;
  if (dim <= 64) return launch_keys<dtype, 64>(params, stream);
  if (dim <= 96) return launch_keys<dtype, 96>(params, stream);
  if (dim <= 128) return launch_keys<dtype, 128>(params, stream);
  if (dim <= 256) return launch_keys<dtype, 256>(params, stream);
  return cudaErrorInvalidValue;
}

cudaError_t launch_float(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend::FloatShape;
  if (params.key.dim > Shape::kMaxDim || params.value.dim > Shape::kMaxDim) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = params.gathered ? &attend::attend_forward_float_kernel<true>
                                      : &attend::attend_forward_float_kernel<false>;
  const int shared_bytes = Shape::shared_bytes(static_cast<int>(params.key.dim),
                                               static_cast<int>(params.value.dim), params.gathered);
  return launch_blocks(kernel, shared_bytes, attend::grid_of(params, Shape::kRows), stream);
}

}  // namespace

cudaError_t launch_attend_forward(const AttendForwardParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.query.batch == 0 || params.query.heads == 0) return cudaSuccess;
  switch (params.query.dtype) {
    case DType::kBFloat16:
      return launch_dims<DType::kBFloat16>(params, stream);
    case DType::kFloat16:
      return launch_dims<DType::kFloat16>(params, stream);
    case DType::kFloat32:
      return launch_float(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace h2o_prefill
