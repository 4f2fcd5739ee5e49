#include "kernels/cuda/linear_attention.h"

#include <algorithm>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_attention.cuh"
#include "kernels/cuda/row_grid.h"

namespace h2o_prefill {
namespace {

using linear::Grid;

constexpr int64_t kMaxDim = 128;

// Blocks that keep a large GPU busy: two for each of about 130 multiprocessors. The number does not
// depend on the device: pieces decide how results are rounded.
constexpr int64_t kBlocks = 256;
constexpr int64_t kLeastPieceRows = 512;

constexpr int kPiecesAhead = 8;  // where pieces are joined

// Long sequences of few heads are split into more pieces. The query heads of a unit share a block,
// as they share its states, unless that makes too few blocks.
Grid grid_of(const LinearAttentionParams& params) {
  Grid grid{};
  grid.params = params;
  grid.units = params.key.batch * params.key.heads;
  const int64_t padded = std::max(params.key.dim, params.value.dim) <= 64 ? 64 : kMaxDim;
  grid.state_floats = padded * padded;
  grid.slot_floats = grid.state_floats + padded;
  const int64_t blocks = std::max<int64_t>(grid.units, 1);
  const int64_t length = params.key.length;
  const int64_t wanted =
      std::min(tile::divide_up(kBlocks, blocks), tile::divide_up(length, kLeastPieceRows));
  const int64_t chunks = tile::divide_up<int64_t>(length, linear::kChunk);
  const int64_t piece_chunks = tile::divide_up(chunks, std::max<int64_t>(wanted, 1));
  grid.piece_rows = piece_chunks * linear::kChunk;
  grid.pieces = static_cast<int>(tile::divide_up(length, std::max<int64_t>(grid.piece_rows, 1)));
  grid.parts = static_cast<int>(
      std::min(grid.group(), tile::divide_up(kBlocks, std::max<int64_t>(blocks * grid.pieces, 1))));
  return grid;
}

cudaError_t launch_blocks(void (*kernel)(Grid), int64_t blocks, int shared_bytes, const Grid& grid,
                          cudaStream_t stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(tile::kThreads), shared_bytes,
                stream, grid);
}

cudaError_t launch_pieces(void (*sums)(Grid), void (*attend)(Grid), int shared_bytes,
                          const Grid& grid, cudaStream_t stream) {
  if (grid.pieces > 1) {
    cudaError_t error = launch_blocks(sums, grid.sums(), shared_bytes, grid, stream);
    if (error != cudaSuccess) return error;
    error = launch(&linear::join_pieces_kernel<kPiecesAhead>,
                   grid_of_rows(grid.slot_floats, linear::kJoinThreads, grid.units),
                   dim3(linear::kJoinThreads), 0, stream, grid);
    if (error != cudaSuccess) return error;
  }
  return launch_blocks(attend, grid.units * grid.pieces * grid.parts, shared_bytes, grid, stream);
}

}  // namespace

bool has_linear_attention(DType dtype, int64_t dim, int64_t value_dim) {
  return dtype != DType::kFloat32 && dim % 8 == 0 && value_dim % 8 == 0 &&
         std::max(dim, value_dim) <= kMaxDim;
}

int64_t linear_attention_workspace_floats(const LinearAttentionParams& params) {
  const Grid grid = grid_of(params);
  return grid.pieces > 1 ? grid.sums() * (grid.slot_floats + 1) : 0;
}

cudaError_t launch_linear_attention(const LinearAttentionParams& params, cudaStream_t stream) {
  const DType dtype = params.key.dtype;
  const int64_t dim = params.key.dim;
  const int64_t value_dim = params.value.dim;
  if (!has_linear_attention(dtype, dim, value_dim)) return cudaErrorInvalidValue;
  const Grid grid = grid_of(params);
  if (grid.units == 0 || grid.pieces == 0) return cudaSuccess;
  return with_half_dtype(dtype, [&](auto type) {
    return with_padded_dim<64, kMaxDim>(std::max(dim, value_dim), [&](auto padded) {
      return launch_pieces(&linear::linear_sums_kernel<type(), padded()>,
                           &linear::linear_attend_kernel<type(), padded()>,
                           static_cast<int>(sizeof(linear::Shared<padded()>)), grid, stream);
    });
  });
}

}  // namespace h2o_prefill
