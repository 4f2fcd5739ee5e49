// Linear attention of 16-bit dtypes on tensor cores, for sm_80 and up: the first and the third
// launch of linear_pieces.cuh.
//
// A block of 4 warps walks a piece in chunks of 64 tokens. Its state lies in the registers of the
// warps as S^T, each warp with a quarter of the value columns: an accumulator of V^T K, rounded in
// pairs, is the b fragment of phi(Q) S as it is, so that the state never goes through shared
// memory. For each chunk and query head of the block
//
//   a warp multiplies 16 rows of phi(Q) phi(K)^T with decays and mask, and leaves them as weights
//   in shared memory, for all warps; then it has, for its columns, phi(Q) S of all rows and adds
//   weights V to it;
//
// and after the last head, S^T = decay S^T + (decayed V)^T phi(K). Keys have two buffers, values
// and queries one: values of the next chunk arrive under Q K^T and Q S, queries under the rest.
//
// What bounds it, for D = Dv = 128, C = 64 and a H200 (989 Tflop/s, 4.8 TB/s, so 206 flops a byte).
// Counted, not measured.
//
//   flops  A token of a query head takes 4 C D in the chunk, of which 2.5 C D are run (the tiles
//          above the diagonal are left out), and 2 D Dv with the state; a token of a KV head 2 D Dv
//          in either launch. With G query heads to a KV head 53 k + 66 k / G a query head.
//   bytes  2 (D + Dv) for a query and an output; keys and values, read twice, and 16 D Dv / R of
//          states, for pieces of R tokens, once for a KV head: 512 + (1024 + 256) / G at R = 1024.
//   ratio  G = 4: 70 kflop and 832 bytes, 84 flops a byte, 41 % of the tensor peak at most.
//          G = 1: 119 kflop and 1792 bytes, 66 flops a byte, 32 %. Memory bounds it.
//
// The multiprocessors are almost as close to their limit. In SASS for sm_90a with elu+1 a warp
// issues about 1800 instructions for a query head of a chunk, 208 of them mma, and 1050 with 128
// mma for the keys and the state in either launch: at one a clock, 47 % of the tensor peak. Shared
// memory moves 210 kB and 144 kB for these: at 128 bytes a clock, 48 %. mma.sync itself reaches
// about 60 % on Hopper.
#pragma once

#include "kernels/cuda/linear_outputs.cuh"
#include "kernels/cuda/linear_state.cuh"

namespace h2o_prefill::linear {

// First launch: a block leaves what its piece brings in the piece's slot.
template <DType dtype, int kDim>
__global__ void __launch_bounds__(tile::kThreads, Shape<kDim>::kBlocksPerSm)
    linear_sums_kernel(const __grid_constant__ Grid grid) {
  using S = Shape<kDim>;
  const LinearAttentionParams& p = grid.params;
  auto& shared = *ptx::dynamic_shared<Shared<kDim>>();
  const Piece x = piece_of(grid, blockIdx.x, grid.pieces - 1, 1);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const tile::HeadRows keys = tile::head_rows(p.key, x.batch, x.kv_head, x.first);
  const tile::HeadRows values = tile::head_rows(p.value, x.batch, x.kv_head, x.first);
  const DecayRows decays = decay_rows(p, x);
  const int chunks = static_cast<int>(tile::divide_up<int64_t>(x.rows, kChunk));
  // Values have the buffer of the queries too.
  const auto value_of = [&](int chunk) { return chunk % 2 ? shared.query : shared.value; };
  const auto load = [&](int chunk) {
    if (chunk < chunks) {
      const int64_t first = static_cast<int64_t>(chunk) * kChunk;
      load_chunk<kDim>(shared.key[chunk % 2], keys, first, rows_of_chunk(x, chunk));
      load_chunk<kDim>(value_of(chunk), values, first, rows_of_chunk(x, chunk));
    }
    ptx::cp_async_commit();
  };

  load(0);
  State<kDim> state;
  if (x.piece == 0) {
    read_start(state, shared, p, x, warp, lane);
  } else {
    state.for_each(warp, lane, [](float& element, int, int) { element = 0.0F; });
    if (threadIdx.x < kDim) shared.normalizer[threadIdx.x] = 0.0F;
  }
  float total = 0.0F;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int count = rows_of_chunk(x, chunk);
    uint16_t* const key = shared.key[chunk % 2];
    __syncthreads();  // nobody reads the previous chunk
    if (p.normalize && chunk > 0) add_key_sums(shared);
    load(chunk + 1);
    ptx::cp_async_wait<1>();
    __syncthreads();
    map_features<dtype, S::kUnits>(key, p.feature_map, count, keys.units);
    if (decays.data && warp == 0) {
      scan_decays(shared.decays, decays, static_cast<int64_t>(chunk) * kChunk, count, lane);
    }
    __syncthreads();
    if (decays.data) total += shared.decays.total();
    if (p.normalize) sum_keys<dtype>(shared, key, decays.data != nullptr, count);
    update_state<dtype>(state, shared, key, value_of(chunk), decays.data != nullptr, warp, lane);
  }
  ptx::cp_async_wait<0>();
  float* const slot = grid.slot(x.unit, x.piece);
  state.for_each_of_slot(slot, warp, lane, [](const float (&own)[4], float4& there) {
    there = make_float4(own[0], own[1], own[2], own[3]);
  });
  if (threadIdx.x == 0) *grid.slot_decay(x.unit, x.piece) = total;
  if (!p.normalize) return;
  __syncthreads();
  add_key_sums(shared);
  if (threadIdx.x < kDim) slot[S::kStateFloats + threadIdx.x] = shared.normalizer[threadIdx.x];
}

// Third launch: a block attends with its query heads over one piece.
template <DType dtype, int kDim>
__global__ void __launch_bounds__(tile::kThreads, Shape<kDim>::kBlocksPerSm)
    linear_attend_kernel(const __grid_constant__ Grid grid) {
  using S = Shape<kDim>;
  const LinearAttentionParams& p = grid.params;
  auto& shared = *ptx::dynamic_shared<Shared<kDim>>();
  const Piece& x = shared.piece;
  if (threadIdx.x == 0) shared.piece = piece_of(grid, blockIdx.x, grid.pieces, grid.parts);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_decays = p.log_decay != nullptr;
  const int chunks = static_cast<int>(tile::divide_up<int64_t>(x.rows, kChunk));
  const auto load = [&](uint16_t* to, const HeadsView& view, int head, int chunk) {
    if (chunk < chunks) {
      load_chunk<kDim>(to, tile::head_rows(view, x.batch, head, x.first),
                       static_cast<int64_t>(chunk) * kChunk, rows_of_chunk(x, chunk));
    }
    ptx::cp_async_commit();
  };
  const auto load_keys = [&](int chunk) {
    load(shared.key[chunk % 2], p.key, static_cast<int>(x.kv_head), chunk);
  };

  load_keys(0);
  load(shared.query, p.query, x.first_head, 0);
  State<kDim> state;
  if (x.piece == 0) {
    read_start(state, shared, p, x, thread / 32, thread % 32);
  } else {
    float* const slot = grid.slot(x.unit, x.piece - 1);
    state.for_each_of_slot(slot, thread / 32, thread % 32,
                           [](float (&own)[4], const float4& there) {
                             own[0] = there.x;
                             own[1] = there.y;
                             own[2] = there.z;
                             own[3] = there.w;
                           });
    if (thread < kDim) {
      shared.normalizer[thread] = p.normalize ? slot[S::kStateFloats + thread] : 0.0F;
    }
  }
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int count = rows_of_chunk(x, chunk);
    const int warp = thread / 32;
    uint16_t* const key = shared.key[chunk % 2];
    __syncthreads();  // nobody reads the previous chunk
    if (p.normalize && chunk > 0) add_key_sums(shared);
    load(shared.value, p.value, static_cast<int>(x.kv_head), chunk);
    load_keys(chunk + 1);
    if constexpr (kScaled<dtype>) {
      const float scale = scale_to_fit<dtype>(warp::max(state.largest()));
      if (thread % 32 == 0) shared.state_scale[warp] = scale;
    }
#pragma unroll 1
    for (int head = x.first_head; head < x.end_head; ++head) {
      const bool is_first = head == x.first_head;
      const int lane = tile::recomputed(thread % 32);
      // Keys and queries are there; values and the next keys may not be.
      if (is_first) {
        ptx::cp_async_wait<2>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();
      map_features<dtype, S::kUnits>(shared.query, p.feature_map, count,
                                     static_cast<int>(p.key.dim) / tile::kUnitElements);
      if (is_first) {
        map_features<dtype, S::kUnits>(key, p.feature_map, count,
                                       static_cast<int>(p.key.dim) / tile::kUnitElements);
        if (has_decays && warp == 0) {
          scan_decays(shared.decays, decay_rows(p, x), static_cast<int64_t>(chunk) * kChunk, count,
                      lane);
        }
      }
      __syncthreads();
      make_weights<dtype>(p, shared, key, has_decays, warp, lane);
      float out[kRowTiles][S::kN][4] = {};
      multiply_state<dtype>(out, shared.query, state,
                            kScaled<dtype> ? shared.state_scale[warp] : 1.0F,
                            tile::recomputed(thread % 32));
      ptx::cp_async_wait<1>();
      __syncthreads();  // weights and values are there, and nobody reads the queries
      const bool is_last = head + 1 == x.end_head;
      load(shared.query, p.query, is_last ? x.first_head : head + 1, chunk + is_last);
      const int again = tile::recomputed(thread % 32);
      if (has_decays || kScaled<dtype>) {
        scale_rows(out, shared, kScaled<dtype> ? inverse_power(shared.state_scale[warp]) : 1.0F,
                   again);
      }
      add_weighted<dtype, kDim>(out, shared.weights, shared.value, warp, again);
      store_rows<dtype>(tile::row_pointer<uint16_t>(p.out, x.batch, head,
                                                    x.first + static_cast<int64_t>(chunk) * kChunk),
                        p.out.stride_row, count,
                        static_cast<int>(p.value.dim) / tile::kUnitElements, out, shared, warp,
                        tile::recomputed(thread % 32));
    }
    if (chunk + 1 == chunks && !x.writes_last_state) break;
    if (p.normalize) sum_keys<dtype>(shared, key, has_decays, count);
    update_state<dtype>(state, shared, key, shared.value, has_decays, warp,
                        tile::recomputed(thread % 32));
  }
  ptx::cp_async_wait<0>();
  if (!x.writes_last_state) return;
  const int dim = static_cast<int>(p.key.dim);
  const int value_dim = static_cast<int>(p.value.dim);
  state.for_each(thread / 32, thread % 32, [&](float& element, int d, int v) {
    if (d < dim && v < value_dim) p.last_state[(x.unit * dim + d) * value_dim + v] = element;
  });
  if (!p.normalize) return;
  __syncthreads();
  add_key_sums(shared);
  const int column = static_cast<int>(threadIdx.x);
  if (column < dim) p.last_normalizer[x.unit * dim + column] = shared.normalizer[column];
}

}  // namespace h2o_prefill::linear
