// A chunk of linear attention in shared memory: sizes, rows, and feature maps of 16-bit dtypes.
#pragma once

#include "kernels/cuda/linear_pieces.cuh"
#include "kernels/cuda/tile.cuh"

namespace h2o_prefill::linear {

constexpr int kChunk = 64;
constexpr int kKeyTiles = kChunk / 8;
constexpr int kRowTiles = kChunk / 16;

// Sizes for rows of kDim elements, to which D and Dv are padded.
template <int kDim>
struct Shape {
  static constexpr int kUnits = kDim / tile::kUnitElements;
  static constexpr int kTile = kChunk * kDim;
  // Tiles of 16 and of 8 value columns of a warp.
  static constexpr int kM = kDim / 16 / tile::kWarps;
  static constexpr int kN = 2 * kM;
  // The rows of a chunk are shared out where keys are added up, a pair of columns a thread.
  static constexpr int kSumParts = tile::kThreads / (kDim / 2);
  static constexpr int kSumRows = kChunk / kSumParts;
  static constexpr int kStateFloats = kDim * kDim;
  static constexpr int kBlocksPerSm = kDim <= 64 ? 4 : 2;  // as far as registers go
};

template <int kDim>
struct alignas(128) Shared {
  uint16_t key[2][Shape<kDim>::kTile];
  uint16_t value[Shape<kDim>::kTile];
  uint16_t query[Shape<kDim>::kTile];
  uint16_t weights[kChunk * kChunk];  // by row and key
  ChunkDecays<kChunk> decays;
  float state_scale[tile::kWarps];  // what state elements of a warp are multiplied by
  float row_scale[kChunk];          // what weights of a row were multiplied by ...
  float row_factor[kChunk];         // ... and its outputs are multiplied by
  float normalizer[kDim];
  float key_sums[Shape<kDim>::kSumParts][kDim];
  float kept;   // decay of the normaliser before the chunk of these sums
  Piece piece;  // read again where it is needed: registers are accumulators
};

// Two blocks fit into a multiprocessor of sm_80, which has 164 kB and takes 1 kB of them a block.
static_assert(Shape<128>::kBlocksPerSm * (sizeof(Shared<128>) + 1024) <= 164 * 1024);

// Whether products and states are scaled where they are rounded, by powers of two: bfloat16 has the
// range of float32.
template <DType dtype>
constexpr bool kScaled = dtype == DType::kFloat16;

// A power that leaves elements up to `largest` in the range.
template <DType dtype>
__device__ __forceinline__ float scale_to_fit(float largest) {
  if constexpr (!kScaled<dtype>) return 1.0F;
  constexpr int kBits = 12;  // of the range, 15
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xFFU) - 127;
  const int scale = kBits - max(min(exponent, 120), -kBits);
  return __uint_as_float(static_cast<uint32_t>(scale + 127) << 23);
}

// 1 / x of such a power.
__device__ __forceinline__ float inverse_power(float x) {
  return __uint_as_float((254U << 23) - __float_as_uint(x));
}

// map() of the first `count` rows of a tile, `units` units each, in place and by all threads.
template <DType dtype, int kUnits, typename Map>
__device__ __forceinline__ void map_rows(uint16_t* rows, int count, int units, const Map& map) {
  constexpr int kPassRows = tile::kThreads / kUnits;
  const int thread = tile::recomputed(static_cast<int>(threadIdx.x));
  const int unit = thread % kUnits;
  if (unit >= units) return;
#pragma unroll 2
  for (int row = thread / kUnits; row < count; row += kPassRows) {
    auto& packed = *reinterpret_cast<tile::Unit*>(rows + tile::element_of<kUnits>(row, unit));
    tile::Unit mapped = packed;
#pragma unroll
    for (uint32_t& word : mapped.words) {
      word = ptx::pack_pair<dtype>(map(ptx::to_float<dtype>(static_cast<uint16_t>(word))),
                                   map(ptx::to_float<dtype>(static_cast<uint16_t>(word >> 16))));
    }
    packed = mapped;
  }
}

template <DType dtype, int kUnits>
__device__ __forceinline__ void map_features(uint16_t* rows, FeatureMap feature_map, int count,
                                             int units) {
  if (feature_map == FeatureMap::kEluPlusOne) {
    map_rows<dtype, kUnits>(rows, count, units, [](float x) { return elu_plus_one(x); });
  } else if (feature_map == FeatureMap::kRelu) {
    map_rows<dtype, kUnits>(rows, count, units, [](float x) { return relu(x); });
  }
}

// Rows [first, first + count) as a tile, zeros after them.
template <int kDim>
__device__ __forceinline__ void load_chunk(uint16_t* to, const tile::HeadRows& rows, int64_t first,
                                           int count) {
  tile::load<kChunk, Shape<kDim>::kUnits>(
      to, rows, [&](int r) { return r < count ? first + r : int64_t{-1}; });
}

__device__ __forceinline__ int rows_of_chunk(const Piece& x, int chunk) {
  return static_cast<int>(min(x.rows - static_cast<int64_t>(chunk) * kChunk, int64_t{kChunk}));
}

}  // namespace h2o_prefill::linear
