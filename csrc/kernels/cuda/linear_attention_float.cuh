// Linear attention of float32, without tensor cores: the same scheme as linear_attention.cuh, for
// any dims up to a largest D.
//
// A block has 32 columns of the values, one a lane, and walks its piece in chunks of 32 tokens. A
// warp has 8 rows of each head's weights and outputs, and every fourth group of 8 rows of the
// state, which lies in shared memory.
#pragma once

#include "kernels/cuda/linear_pieces.cuh"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::linear {

struct FloatShape {
  static constexpr int kChunk = 32;
  static constexpr int kColumns = 32;
  static constexpr int kWarpRows = kChunk / tile::kWarps;
  static constexpr int kMaxDim = 192;
  static constexpr int kBlocksPerSm = 4;

  // Columns of queries and keys, zeros after the last one, in whole rows of the state of a warp.
  __host__ __device__ static constexpr int padded(int dim) {
    return tile::divide_up(dim, kWarpRows) * kWarpRows;
  }
  // Rows an odd number of 16 bytes apart.
  __host__ __device__ static constexpr int stride(int dim) { return padded(dim) + 4; }
  __host__ __device__ static constexpr int state_floats(int dim) { return padded(dim) * kColumns; }
  static constexpr int shared_bytes(int dim) {
    return 4 * (2 * kChunk * stride(dim) + 2 * kChunk * kColumns + state_floats(dim) +
                padded(dim)) +
           static_cast<int>(sizeof(ChunkDecays<kChunk>));
  }
};

// c[r] += rows[r] . x for rows `stride` apart that all lanes read, and four elements of a lane's x.
template <int kRows>
__device__ __forceinline__ void multiply_four(float (&c)[kRows], const float* rows, int stride,
                                              const float (&x)[4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float4 row = *reinterpret_cast<const float4*>(rows + r * stride);
    c[r] += row.x * x[0];
    c[r] += row.y * x[1];
    c[r] += row.z * x[2];
    c[r] += row.w * x[3];
  }
}

// kAttends: the third launch, else the first.
template <bool kAttends>
__global__ void __launch_bounds__(tile::kThreads, FloatShape::kBlocksPerSm)
    linear_float_kernel(const __grid_constant__ Grid grid) {
  using S = FloatShape;
  constexpr int kChunk = S::kChunk;
  constexpr int kColumns = S::kColumns;
  constexpr int kRows = S::kWarpRows;
  const LinearAttentionParams& p = grid.params;
  const int dim = static_cast<int>(p.key.dim);
  const int padded = S::padded(dim);
  const int stride = S::stride(dim);
  float* const key = ptx::dynamic_shared<float>();
  float* const query = key + kChunk * stride;
  float* const value = query + kChunk * stride;
  float* const weights = value + kChunk * kColumns;
  float* const state = weights + kChunk * kChunk;
  float* const normalizer = state + S::state_floats(dim);
  auto& decays = *reinterpret_cast<ChunkDecays<kChunk>*>(normalizer + padded);

  const Piece x = kAttends ? piece_of(grid, blockIdx.x, grid.pieces, grid.parts)
                           : piece_of(grid, blockIdx.x, grid.pieces - 1, 1);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int first_row = thread / 32 * kRows;  // of the warp, in chunks and in every 32 of the state
  const int column = x.value_block * kColumns + lane;
  const bool has_column = column < p.value.dim;
  const DecayRows decay = decay_rows(p, x);

  // A thread reads, updates and writes the same elements of the state and of the normaliser.
  const auto for_each_state = [&](const auto& visit) {
    for (int first = first_row; first < padded; first += kColumns) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) visit(state[(first + r) * kColumns + lane], first + r);
    }
  };
  const auto for_each_normalizer = [&](const auto& visit) {
    for (int d = thread; d < padded; d += tile::kThreads) visit(normalizer[d], d);
  };
  const auto slot_of = [&](int piece) { return grid.slot(x.unit, piece); };
  const auto slot_element = [&](int d) {
    return x.value_block * S::state_floats(dim) + d * kColumns + lane;
  };
  const int64_t of_unit = x.unit * dim;
  if (x.piece == 0) {
    for_each_state([&](float& element, int d) {
      element =
          p.state && d < dim && has_column ? p.state[(of_unit + d) * p.value.dim + column] : 0.0F;
    });
    for_each_normalizer([&](float& element, int d) {
      element = p.normalizer && d < dim ? p.normalizer[of_unit + d] : 0.0F;
    });
  } else if (kAttends) {
    const float* const slot = slot_of(x.piece - 1);
    for_each_state([&](float& element, int d) { element = slot[slot_element(d)]; });
    for_each_normalizer(
        [&](float& element, int d) { element = p.normalize ? slot[grid.state_floats + d] : 0.0F; });
  } else {
    for_each_state([](float& element, int) { element = 0.0F; });
    for_each_normalizer([](float& element, int) { element = 0.0F; });
  }

  // Features of rows `row`, `row` + `step`, ... of a chunk, by one warp; zeros after the last.
  const auto load = [&](float* to, const HeadsView& view, int64_t head, int64_t first, int count,
                        int row, int step, int end) {
    const float* const from = tile::row_pointer<const float>(view, x.batch, head, first);
    for (; row < end; row += step) {
      for (int d = lane; d < padded; d += 32) {
        to[row * stride + d] = row < count && d < dim
                                   ? feature_of(p.feature_map, from[row * view.stride_row + d])
                                   : 0.0F;
      }
    }
  };

  // Attends with a warp's rows of a query head.
  const auto attend = [&](int64_t head, int64_t first, int count) {
    __syncwarp();
    load(query, p.query, head, first, count, first_row, 1, first_row + kRows);
    __syncwarp();
    const float* const rows = query + first_row * stride;
    float s[kRows] = {};
    for (int d = 0; d < padded; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(key + lane * stride + d);
      multiply_four(s, rows + d, stride, {k.x, k.y, k.z, k.w});
    }
    float factors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r;
      if (decay.data) s[r] *= decays.between(lane, row);
      if (lane > row) s[r] = 0.0F;
      weights[row * kChunk + lane] = s[r];
      float share = 0.0F;
      if (p.normalize) {
        for (int d = lane; d < padded; d += 32) share += rows[r * stride + d] * normalizer[d];
        if (decay.data) share *= decays.from_start[row];
        share = warp::sum(share + s[r]);
      }
      factors[r] = output_factor(p, share);
    }
    __syncwarp();
    float out[kRows] = {};
    for (int d = 0; d < padded; d += 4) {
      const float* const own = state + d * kColumns + lane;
      multiply_four(out, rows + d, stride,
                    {own[0], own[kColumns], own[2 * kColumns], own[3 * kColumns]});
    }
    if (decay.data) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) out[r] *= decays.from_start[first_row + r];
    }
    for (int j = 0; j < kChunk; j += 4) {
      const float* const own = value + j * kColumns + lane;
      multiply_four(out, weights + first_row * kChunk + j, kChunk,
                    {own[0], own[kColumns], own[2 * kColumns], own[3 * kColumns]});
    }
    float* const to = tile::row_pointer<float>(p.out, x.batch, head, first) + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r;
      if (row < count && has_column) to[row * p.out.stride_row] = out[r] * factors[r];
    }
  };

  float total = 0.0F;
  for (int64_t done = 0; done < x.rows; done += kChunk) {
    const int64_t first = x.first + done;
    const int count = static_cast<int>(min(x.rows - done, int64_t{kChunk}));
    __syncthreads();  // nobody reads the previous chunk
    load(key, p.key, x.kv_head, first, count, thread / 32, tile::kWarps, kChunk);
    const float* const from =
        tile::row_pointer<const float>(p.value, x.batch, x.kv_head, first) + column;
    for (int row = thread / 32; row < kChunk; row += tile::kWarps) {
      value[row * kColumns + lane] =
          row < count && has_column ? from[row * p.value.stride_row] : 0.0F;
    }
    if (decay.data && thread < 32) scan_decays(decays, decay, done, count, lane);
    __syncthreads();
    if constexpr (kAttends) {
      for (int head = x.first_head; head < x.end_head; ++head) attend(head, first, count);
      if (done + kChunk >= x.rows && !x.writes_last_state) return;
    }
    __syncthreads();  // nobody reads the state
    const float kept = decay.data ? decays.kept() : 1.0F;
    if (decay.data) total += decays.total();
    for (int d = first_row; d < padded; d += kColumns) {
      // Added to the state as a whole: fewer roundings of long sums.
      float sums[kRows] = {};
#pragma unroll 2
      for (int j = 0; j < kChunk; ++j) {
        const float v = value[j * kColumns + lane] * (decay.data ? decays.to_end[j] : 1.0F);
#pragma unroll
        for (int r = 0; r < kRows; r += 4) {
          const float4 k = *reinterpret_cast<const float4*>(key + j * stride + d + r);
          sums[r] += k.x * v;
          sums[r + 1] += k.y * v;
          sums[r + 2] += k.z * v;
          sums[r + 3] += k.w * v;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& element = state[(d + r) * kColumns + lane];
        element = kept * element + sums[r];
      }
    }
    if (!p.normalize) continue;
    for_each_normalizer([&](float& element, int d) {
      float sum = 0.0F;
      for (int j = 0; j < count; ++j) {
        sum += key[j * stride + d] * (decay.data ? decays.to_end[j] : 1.0F);
      }
      element = kept * element + sum;
    });
  }

  if constexpr (kAttends) {
    for_each_state([&](float& element, int d) {
      if (d < dim && has_column) p.last_state[(of_unit + d) * p.value.dim + column] = element;
    });
    if (!p.normalize || x.value_block > 0) return;
    for_each_normalizer([&](float& element, int d) {
      if (d < dim) p.last_normalizer[of_unit + d] = element;
    });
  } else {
    float* const slot = slot_of(x.piece);
    for_each_state([&](float& element, int d) { slot[slot_element(d)] = element; });
    if (x.value_block > 0) return;
    for_each_normalizer([&](float& element, int d) { slot[grid.state_floats + d] = element; });
    if (thread == 0) *grid.slot_decay(x.unit, x.piece) = total;
  }
}

}  // namespace h2o_prefill::linear
