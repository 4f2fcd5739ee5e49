#include "kernels/cuda/attend_forward_sm90.h"

#include <algorithm>

#include "kernels/cuda/attend_forward_sm90.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/request_sm90.h"

namespace h2o_prefill {
namespace {

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_tiles(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend_sm90::Shape<kDim>;
  const attend::ForwardGrid grid = attend::grid_of(params, Shape::kRows);
  if (grid.row_tiles() == 0) return cudaErrorInvalidConfiguration;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const uint32_t blocks = std::min(grid.row_tiles(), static_cast<uint32_t>(multiprocessors));
  return launch(&attend_sm90::attend_forward_sm90_kernel<dtype, kDim, kGathered>, dim3(blocks),
                dim3(sm90::kThreads), sm90::shared_bytes<typename Shape::Shared>(), stream, grid);
}

template <DType dtype, int kDim>
cudaError_t launch_keys(const AttendForwardParams& params, cudaStream_t stream) {
  return params.gathered ? launch_tiles<dtype, kDim, true>(params, stream)
                         : launch_tiles<dtype, kDim, false>(params, stream);
}

int64_t widest(const AttendForwardParams& params) {
  return std::max(params.key.dim, params.value.dim);
}

template <DType dtype>
cudaError_t launch_dims(const AttendForwardParams& params, cudaStream_t stream) {
  return widest(params) <= 64 ? launch_keys<dtype, 64>(params, stream)
                              : launch_keys<dtype, 128>(params, stream);
}

}  // namespace

bool has_attend_forward_sm90(const AttendForwardParams& params) {
  return params.query.dtype != DType::kFloat32 && has_rows_of_sm90(widest(params)) &&
         params.scale_log2 > 0.0F;
}

bool use_attend_forward_sm90() {
  return use_sm90(&attend_sm90::attend_forward_sm90_kernel<DType::kBFloat16, 128, true>,
                  sm90::kProducerRegisters);
}

cudaError_t launch_attend_forward_sm90(const AttendForwardParams& params, cudaStream_t stream) {
  if (!has_attend_forward_sm90(params)) return cudaErrorInvalidValue;
  if (params.rows == 0 || params.query.batch == 0 || params.query.heads == 0) return cudaSuccess;
  return params.query.dtype == DType::kBFloat16 ? launch_dims<DType::kBFloat16>(params, stream)
                                                : launch_dims<DType::kFloat16>(params, stream);
}

}  // namespace h2o_prefill
