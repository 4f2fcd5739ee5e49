#include "kernels/cuda/column_sums.h"

#include <type_traits>

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/column_sums_float.cuh"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {
namespace {

// Blocks that fill any GPU. With fewer, the query heads and rows of a key tile are shared out.
constexpr int64_t kManyBlocks = 256;

// How a launch is divided; `params` and what depends on the GPU's types is left out.
struct Division {
  int64_t units;
  int64_t group;
  int64_t head_parts;
  int64_t row_parts;
  int64_t chunks;
  int64_t tiles;
  int64_t split_rows;

  int64_t blocks() const { return units * head_parts * row_parts * chunks * tiles; }
  bool shared() const { return head_parts * row_parts > 1; }
};

int64_t columns_of(const ColumnSumsParams& p) { return p.gathered ? p.width : p.rows; }

Division divide(const ColumnSumsParams& p, int64_t keys_of_tile, int64_t rows_of_tile,
                bool may_share) {
  const int64_t chunk =
      !p.gathered && p.chunk_size < p.rows ? p.chunk_size : columns_of(p);  // columns
  Division d{};
  d.units = p.key.batch * p.key.heads;
  d.group = p.query.heads / p.key.heads;
  d.head_parts = 1;
  d.row_parts = 1;
  d.chunks = p.gathered ? 1 : tile::divide_up(p.rows, chunk);
  d.tiles = tile::divide_up(chunk, keys_of_tile);
  d.split_rows = p.rows;
  if (!may_share || d.blocks() >= kManyBlocks) return d;
  d.head_parts = d.group;
  const int64_t row_tiles = tile::divide_up(p.rows, rows_of_tile);
  const int64_t wanted = kManyBlocks / d.blocks();
  if (p.gathered && wanted > 1 && row_tiles > 1) {
    const int64_t tiles_of_part = tile::divide_up(row_tiles, wanted);
    d.row_parts = tile::divide_up(row_tiles, tiles_of_part);
    d.split_rows = tiles_of_part * rows_of_tile;
  }
  return d;
}

bool is_empty(const ColumnSumsParams& p) {
  return p.query.batch == 0 || p.query.heads == 0 || p.key.heads == 0 || columns_of(p) == 0;
}

template <int kDim>
Division divide_for(const ColumnSumsParams& params, bool may_share) {
  using Shape = column_sums::Shape<kDim>;
  return divide(params, Shape::kKeys, Shape::kRows, may_share);
}

// Calls run with the padded head dim as std::integral_constant.
template <typename Run>
auto with_dim(int64_t dim, const Run& run) {
  if (dim <= 64) return run(std::integral_constant<int, 64>());
  if (dim <= 96) return run(std::integral_constant<int, 96>());
  if (dim <= 128) return run(std::integral_constant<int, 128>());
  return run(std::integral_constant<int, 256>());
}

column_sums::Grid grid_of(const ColumnSumsParams& params, const Division& d) {
  const auto narrow = [](int64_t x) { return static_cast<uint32_t>(x); };
  return {params,
          narrow(d.units),
          narrow(d.group),
          narrow(d.head_parts),
          narrow(d.row_parts),
          narrow(d.chunks),
          narrow(d.tiles),
          static_cast<int>(d.split_rows)};
}

cudaError_t launch_blocks(void (*kernel)(column_sums::Grid), int shared_bytes, const Division& d,
                          const ColumnSumsParams& params, cudaStream_t stream) {
  if (d.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(static_cast<unsigned>(d.blocks())), dim3(tile::kThreads), shared_bytes,
                stream, grid_of(params, d));
}

template <DType dtype, int kDim, bool kGathered>
cudaError_t launch_parts(const ColumnSumsParams& params, cudaStream_t stream) {
  const Division d = divide_for<kDim>(params, params.partial != nullptr);
  const cudaError_t error =
      launch_blocks(&column_sums::column_sums_kernel<dtype, kDim, kGathered>,
                    column_sums::Shape<kDim>::kSharedBytes, d, params, stream);
  if (error != cudaSuccess || !d.shared()) return error;
  constexpr int64_t kThreads = column_sums::kReduceThreads;
  const int64_t blocks = d.units * tile::divide_up(columns_of(params), kThreads);
  return launch(&column_sums::reduce_partial_kernel<kGathered>, dim3(static_cast<unsigned>(blocks)),
                dim3(static_cast<unsigned>(kThreads)), 0, stream, grid_of(params, d));
}

template <DType dtype>
cudaError_t launch_dims(const ColumnSumsParams& params, cudaStream_t stream) {
  if (params.key.dim > 256) return cudaErrorInvalidValue;
  return with_dim(params.key.dim, [&](auto dim) {
    return params.gathered ? launch_parts<dtype, dim(), true>(params, stream)
                           : launch_parts<dtype, dim(), false>(params, stream);
  });
}

cudaError_t launch_float(const ColumnSumsParams& params, cudaStream_t stream) {
  using Shape = column_sums::FloatShape;
  if (params.key.dim > Shape::kMaxDim) return cudaErrorInvalidValue;
  const auto kernel = params.gathered ? &column_sums::column_sums_float_kernel<true>
                                      : &column_sums::column_sums_float_kernel<false>;
  return launch_blocks(kernel, Shape::shared_bytes(static_cast<int>(params.key.dim)),
                       divide(params, Shape::kKeys, Shape::kRows, false), params, stream);
}

}  // namespace

int64_t column_sums_partial_floats(const ColumnSumsParams& params) {
  if (params.query.dtype == DType::kFloat32 || is_empty(params)) return 0;
  const Division d =
      with_dim(params.key.dim, [&](auto dim) { return divide_for<dim()>(params, true); });
  return d.shared() ? d.units * d.head_parts * d.row_parts * columns_of(params) : 0;
}

cudaError_t launch_column_sums(const ColumnSumsParams& params, cudaStream_t stream) {
  if (is_empty(params)) return cudaSuccess;
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
