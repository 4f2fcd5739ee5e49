#include "kernels/cuda/column_sums.h"

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/column_sums_float.cuh"
#include "kernels/cuda/column_sums_launch.cuh"
#include "kernels/cuda/dispatch.h"

namespace h2o_prefill {
namespace {

template <typename Shape>
constexpr column_sums::TileSizes kTileSizes{
    .keys = Shape::kKeys, .rows = Shape::kRows, .many_blocks = kManyBlocks};

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_tiles(const ColumnSumsParams& params, cudaStream_t stream) {
  using Shape = column_sums::Shape<kDim>;
  return column_sums::launch_grid<kGathered>(
      &column_sums::column_sums_kernel<dtype, kDim, kGathered>, tile::kThreads, Shape::kSharedBytes,
      column_sums::divide(params, kTileSizes<Shape>, params.partial != nullptr), stream);
}

column_sums::Grid divide_float(const ColumnSumsParams& params) {
  return column_sums::divide(params, kTileSizes<column_sums::FloatShape>, /*may_share=*/false);
}

template <bool kGathered>
cudaError_t launch_float(const ColumnSumsParams& params, cudaStream_t stream) {
  using Shape = column_sums::FloatShape;
  if (params.key.dim > Shape::kMaxDim) return cudaErrorInvalidValue;
  return column_sums::launch_grid<kGathered>(
      &column_sums::column_sums_float_kernel<kGathered>, tile::kThreads,
      Shape::shared_bytes(static_cast<int>(params.key.dim)), divide_float(params), stream);
}

template <typename Visitor>
cudaError_t with_dim(const ColumnSumsParams& params, const Visitor& visit) {
  return with_padded_dim<64, 96, 128, 256>(params.key.dim, visit);
}

}  // namespace

column_sums::Grid divide_column_sums(const ColumnSumsParams& params) {
  column_sums::Grid grid = divide_float(params);
  if (params.query.dtype == DType::kFloat32) return grid;
  with_dim(params, [&](auto padded) {
    grid =
        column_sums::divide(params, kTileSizes<column_sums::Shape<padded()>>, /*may_share=*/true);
    return cudaSuccess;
  });
  return grid;
}

cudaError_t launch_column_sums(const ColumnSumsParams& params, cudaStream_t stream) {
  return with_kind(params.gathered, [&](auto gathered) {
    if (params.query.dtype == DType::kFloat32) return launch_float<gathered()>(params, stream);
    return with_half_dtype(params.query.dtype, [&](auto dtype) {
      return with_dim(params, [&](auto padded) {
        return launch_tiles<dtype(), padded(), gathered()>(params, stream);
      });
    });
  });
}

}  // namespace h2o_prefill
