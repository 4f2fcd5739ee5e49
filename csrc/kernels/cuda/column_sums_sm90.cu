#include "kernels/cuda/column_sums_sm90.h"

#include "kernels/cuda/column_sums_sm90.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/request_sm90.h"

namespace h2o_prefill {
namespace {

using column_sums::Grid;

// One block an SM: with fewer than these, the query heads and rows of a key tile are shared out.
constexpr int64_t kManyBlocks = 128;

int64_t columns_of(const ColumnSumsParams& p) { return p.gathered ? p.width : p.rows; }

bool is_empty(const ColumnSumsParams& p) {
  return p.query.batch == 0 || p.query.heads == 0 || p.key.heads == 0 || columns_of(p) == 0;
}

// How the launch is divided, and its number of blocks.
struct Division {
  Grid grid;
  int64_t blocks;

  bool shared() const { return grid.head_parts * grid.row_parts > 1; }
};

Division divide(const ColumnSumsParams& p, bool may_share) {
  const int64_t chunk =
      !p.gathered && p.chunk_size < p.rows ? p.chunk_size : columns_of(p);  // columns
  const int64_t units = p.key.batch * p.key.heads;
  const int64_t group = p.query.heads / p.key.heads;
  const int64_t chunks = p.gathered ? 1 : tile::divide_up(p.rows, chunk);
  const int64_t tiles = tile::divide_up<int64_t>(chunk, column_sums_sm90::kKeys);
  int64_t head_parts = 1, row_parts = 1, split_rows = p.rows;
  int64_t blocks = units * chunks * tiles;
  if (may_share && blocks < kManyBlocks) {
    head_parts = group;
    blocks *= group;
    const int64_t row_tiles = tile::divide_up<int64_t>(p.rows, column_sums_sm90::kRows);
    const int64_t wanted = kManyBlocks / blocks;
    if (p.gathered && wanted > 1 && row_tiles > 1) {
      const int64_t tiles_of_part = tile::divide_up(row_tiles, wanted);
      row_parts = tile::divide_up(row_tiles, tiles_of_part);
      split_rows = tiles_of_part * column_sums_sm90::kRows;
      blocks *= row_parts;
    }
  }
  const auto narrow = [](int64_t x) { return static_cast<uint32_t>(x); };
  return {{p, narrow(units), narrow(group), narrow(head_parts), narrow(row_parts), narrow(chunks),
           narrow(tiles), static_cast<int>(split_rows)},
          blocks};
}

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_parts(const ColumnSumsParams& params, cudaStream_t stream) {
  const Division d = divide(params, params.partial != nullptr);
  if (d.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      launch(&column_sums_sm90::column_sums_sm90_kernel<dtype, kDim, kGathered>,
             dim3(static_cast<unsigned>(d.blocks)), dim3(sm90::kThreads),
             sm90::shared_bytes<typename column_sums_sm90::Shape<kDim>::Shared>(), stream, d.grid);
  if (error != cudaSuccess || !d.shared()) return error;
  constexpr int64_t kThreads = column_sums::kReduceThreads;
  const int64_t blocks = d.grid.units * tile::divide_up(columns_of(params), kThreads);
  return launch(&column_sums::reduce_partial_kernel<kGathered>, dim3(static_cast<unsigned>(blocks)),
                dim3(static_cast<unsigned>(kThreads)), 0, stream, d.grid);
}

template <DType dtype, int kDim>
cudaError_t launch_dim(const ColumnSumsParams& params, cudaStream_t stream) {
  return params.gathered ? launch_parts<dtype, kDim, true>(params, stream)
                         : launch_parts<dtype, kDim, false>(params, stream);
}

template <DType dtype>
cudaError_t launch_dims(const ColumnSumsParams& params, cudaStream_t stream) {
  return params.key.dim <= 64 ? launch_dim<dtype, 64>(params, stream)
                              : launch_dim<dtype, 128>(params, stream);
}

}  // namespace

bool has_column_sums_sm90(const ColumnSumsParams& params) {
  return params.query.dtype != DType::kFloat32 && has_rows_of_sm90(params.key.dim);
}

bool use_column_sums_sm90() {
  return use_sm90(&column_sums_sm90::column_sums_sm90_kernel<DType::kBFloat16, 128, true>,
                  sm90::kProducerRegisters);
}

int64_t column_sums_sm90_partial_floats(const ColumnSumsParams& params) {
  if (!has_column_sums_sm90(params) || is_empty(params)) return 0;
  const Division d = divide(params, true);
  if (!d.shared()) return 0;
  return int64_t{d.grid.units} * d.grid.head_parts * d.grid.row_parts * columns_of(params);
}

cudaError_t launch_column_sums_sm90(const ColumnSumsParams& params, cudaStream_t stream) {
  if (!has_column_sums_sm90(params)) return cudaErrorInvalidValue;
  if (is_empty(params)) return cudaSuccess;
  return params.query.dtype == DType::kBFloat16 ? launch_dims<DType::kBFloat16>(params, stream)
                                                : launch_dims<DType::kFloat16>(params, stream);
}

}  // namespace h2o_prefill
