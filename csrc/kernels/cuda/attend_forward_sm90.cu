#include "kernels/cuda/attend_forward_sm90.h"

#include <algorithm>

#include "kernels/cuda/attend_forward_sm90.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/dims_sm90.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {
namespace {

template <DType dtype, int kDim, attend::KeyKind kKind>
cudaError_t launch_tiles(const AttendForwardParams& params, cudaStream_t stream) {
  using Shape = attend_sm90::Shape<kDim>;
  const attend::ForwardGrid grid =
      attend::grid_of(params, Shape::kRows, kKind == attend::KeyKind::kGathered);
  if (grid.row_tiles() == 0) return cudaErrorInvalidConfiguration;
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;
  const uint32_t blocks = std::min(grid.row_tiles(), static_cast<uint32_t>(multiprocessors));
  return launch(&attend_sm90::attend_forward_sm90_kernel<dtype, kDim, kKind>, dim3(blocks),
                dim3(sm90::kThreads), sm90::shared_bytes<typename Shape::Shared>(), stream, grid,
                /*overlapped=*/true);
}

int64_t widest(const AttendForwardParams& params) {
  return std::max(params.key.dim, params.value.dim);
}

}  // namespace

bool has_attend_forward_sm90(const AttendForwardParams& params) {
  return params.query.dtype != DType::kFloat32 && has_rows_of_sm90(widest(params)) &&
         params.scale_log2 > 0.0F && params.cap_scale == 0.0F;
}

cudaError_t launch_attend_forward_sm90(const AttendForwardParams& params, cudaStream_t stream) {
  if (!has_attend_forward_sm90(params)) return cudaErrorInvalidValue;
  if (params.rows.count == 0 || params.query.batch == 0 || params.query.heads == 0) {
    return cudaSuccess;
  }
  return attend::with_key_kind(params, [&](auto kind) {
    return with_half_dtype(params.query.dtype, [&](auto dtype) {
      return with_padded_dim<64, 128>(widest(params), [&](auto padded) {
        return launch_tiles<dtype(), padded(), kind()>(params, stream);
      });
    });
  });
}

bool has_code_for_sm90a() {
  const auto kernel =
      &attend_sm90::attend_forward_sm90_kernel<DType::kBFloat16, 128, attend::KeyKind::kGathered>;
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
         attributes.numRegs > sm90::kProducerRegisters;
}

}  // namespace h2o_prefill
