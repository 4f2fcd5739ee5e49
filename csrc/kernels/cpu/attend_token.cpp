// Softmax attention of a few rows to keys that are not packed, as decoding has it: the rows of all
// heads of a group meet a key or value while it is in L1. Compiled once per instruction set.
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/softmax_rows.h"

namespace h2o_prefill::H2O_ISA {
namespace {

// Elements of a row are read by blocks of two vectors.
constexpr int kBlock = 2 * kLanes;
constexpr int64_t kKeys = AttendTokenArgs::kKeys;
static_assert(kPanel <= AttendTokenArgs::kWidestPanel && kBlock <= AttendTokenArgs::kWidestPanel);

// Bytes by which rows are prefetched: processors' own prefetching ends with a page.
constexpr int64_t kAhead = 8192;

// Sums of each of kN rows that stay in registers, of so many keys or vectors of values. The mask of
// odd bfloat16 takes one of 16 registers.
template <DType kType, int kN>
constexpr int kSums = kN * 4 + (kType == DType::kBFloat16) <= (kTileRows > 6 ? 17 : 12) ? 4 : 2;

// Rows of whole blocks.
struct Blocks {
  const char* data;
  int64_t stride;  // in bytes
  int64_t ahead;   // the row that is prefetched, in bytes

  H2O_INLINE const char* row(int64_t i) const { return data + i * stride; }
};

// `count` rows of `dim` elements from `offset` on, copied to end in zeros unless a block ends
// there.
template <DType kType>
H2O_INLINE Blocks whole_blocks(const void* data, int64_t offset, int64_t stride, int64_t count,
                               int64_t dim, float* copy) {
  constexpr int64_t kSize = size_of(kType);
  const int64_t ahead = kAhead / (dim * kSize) + 1;
  const Blocks rows{static_cast<const char*>(data) + offset * kSize, stride * kSize,
                    ahead * stride * kSize};
  if (dim % kBlock == 0) return rows;
  const Blocks padded{reinterpret_cast<const char*>(copy), pad_to(dim, kBlock) * kSize, 0};
  for (int64_t i = 0; i < count; ++i) {
    char* row = reinterpret_cast<char*>(copy) + i * padded.stride;
    __builtin_memcpy(row, rows.row(i), dim * kSize);
    __builtin_memset(row + dim * kSize, 0, padded.stride - dim * kSize);
  }
  return padded;
}

// Half of the block at element d: the first or last kLanes, of bfloat16 the even or odd ones, which
// no shuffle has to part.
template <DType kType, int kHalf>
H2O_INLINE Vec load_half(const char* row, int64_t d) {
  row += (d + (kType == DType::kBFloat16 ? 0 : kHalf * kLanes)) * size_of(kType);
  if constexpr (kType == DType::kBFloat16) {
    UintVec pairs;
    __builtin_memcpy(&pairs, row, sizeof(pairs));
    return reinterpret_cast<Vec>(kHalf ? pairs & 0xFFFF0000U : pairs << 16);
  }
  if constexpr (kType == DType::kFloat32) return load(reinterpret_cast<const float*>(row));
  return load_float16(reinterpret_cast<const uint16_t*>(row));
}

// sum[h][i] += query[h] row[i], elementwise, over half of the block at d.
template <DType kType, int kN, int kHalf>
H2O_INLINE void add_products(const float* query, int64_t dims, int64_t d,
                             const char* const (&rows)[kSums<kType, kN>],
                             Vec (&sum)[kN][kSums<kType, kN>]) {
  Vec x[kSums<kType, kN>];
#pragma GCC unroll 4
  for (int i = 0; i < kSums<kType, kN>; ++i) x[i] = load_half<kType, kHalf>(rows[i], d);
#pragma GCC unroll 4
  for (int h = 0; h < kN; ++h) {
    const Vec q = load(query + h * dims + d + kHalf * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kSums<kType, kN>; ++i) sum[h][i] = q * x[i] + sum[h][i];
  }
}

// Products z[h, j] of kN rows with `count` keys. Not inlined: its loop needs all registers.
template <DType kType, int kN>
__attribute__((noinline)) void multiply_keys(const float* query, int64_t dims, const Blocks& keys,
                                             int64_t count, float* z, int64_t stride) {
  for (int64_t j = 0; j < count; j += kLanes) {
    Vec products[kN][kLanes];
    for (int first = 0; first < kLanes; first += kSums<kType, kN>) {
      const char* rows[kSums<kType, kN>];
      for (int i = 0; i < kSums<kType, kN>; ++i) {
        const int64_t key = j + first + i;
        rows[i] = keys.row(key < count ? key : count - 1);  // what follows is not used
        prefetch_row<0>(keys.row(key) + keys.ahead, kType, 0, dims);
      }
      Vec sum[kN][kSums<kType, kN>] = {};
      for (int64_t d = 0; d < dims; d += kBlock) {
        add_products<kType, kN, 0>(query, dims, d, rows, sum);
        add_products<kType, kN, 1>(query, dims, d, rows, sum);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kN; ++h) {
#pragma GCC unroll 4
        for (int i = 0; i < kSums<kType, kN>; ++i) products[h][first + i] = sum[h][i];
      }
    }
    for (int h = 0; h < kN; ++h) store(z + h * stride + j, add_lanes(products[h]));
  }
}

// sums[h, d] += sum over `count` keys of p[h, j] value[j, d], for kN rows, kVectors of d at a time.
template <DType kType, int kN, int kVectors = kSums<kType, kN>>
__attribute__((noinline)) void multiply_values(const float* p, int64_t stride, const Blocks& values,
                                               int64_t count, float* sums, int64_t dims,
                                               int64_t d = 0) {
  for (; d + kVectors * kLanes <= dims; d += kVectors * kLanes) {
    Vec sum[kN][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kN; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[h][v] = load(sums + h * dims + d + v * kLanes);
    }
    for (int64_t j = 0; j < count; ++j) {
      prefetch_row<0>(values.row(j) + values.ahead, kType, d, kVectors * kLanes);
      Vec weight[kN];
#pragma GCC unroll 4
      for (int h = 0; h < kN; ++h) weight[h] = broadcast(p[h * stride + j]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v += 2) {
        const Vec x = load_half<kType, 0>(values.row(j), d + v * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < kN; ++h) sum[h][v] = weight[h] * x + sum[h][v];
        const Vec y = load_half<kType, 1>(values.row(j), d + v * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < kN; ++h) sum[h][v + 1] = weight[h] * y + sum[h][v + 1];
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kN; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(sums + h * dims + d + v * kLanes, sum[h][v]);
    }
  }
  if constexpr (kVectors > 2) {
    if (d < dims) multiply_values<kType, kN, 2>(p, stride, values, count, sums, dims, d);
  }
}

// use<n>(row) for n rows from `row` on, of all.
template <int kN = 4, typename Use>
H2O_INLINE void for_rows(int64_t rows, const Use& use, int64_t row = 0) {
  for (; row + kN <= rows; row += kN) use.template operator()<kN>(row);
  if constexpr (kN > 1) for_rows<kN - 1>(rows, use, row);
}

template <DType kType>
void attend_group(const AttendTokenArgs& args) {
  const int64_t dims = pad_to(args.head_dim, kBlock);
  const int64_t value_dims = pad_to(args.value_dim, kBlock);
  const int64_t stride = pad_to(args.count, kPanel);
  const int64_t rows = args.heads * args.rows;
  float* query = args.scratch;
  float* z = query + rows * dims;
  float* sums = z + rows * stride;
  float* copy = sums + rows * value_dims;
  const LogitScale logits = logit_scale(args.scale, args.softcap);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = r / args.rows * args.head_stride + r % args.rows * args.row_stride;
    const Blocks row = whole_blocks<kType>(args.query, offset, 0, 1, args.head_dim, copy);
    for (int64_t d = 0; d < dims; d += kBlock) {
      store(query + r * dims + d, load_half<kType, 0>(row.data, d) * logits.sign);
      store(query + r * dims + d + kLanes, load_half<kType, 1>(row.data, d) * logits.sign);
    }
  }
  const auto for_panels = [&](const void* data, int64_t row_stride, int64_t dim, const auto& use) {
    for (int64_t j = 0; j < args.count; j += kKeys) {
      const int64_t n = args.count - j < kKeys ? args.count - j : kKeys;
      use(j, n, whole_blocks<kType>(data, j * row_stride, row_stride, n, dim, copy));
    }
  };
  for_panels(args.keys, args.key_stride, args.head_dim, [&](int64_t j, int64_t n, Blocks keys) {
    for_rows(rows, [&]<int kN>(int64_t r) {
      multiply_keys<kType, kN>(query + r * dims, dims, keys, n, z + r * stride + j, stride);
    });
  });
  for (int64_t r = 0; r < rows; ++r) {
    float* row = z + r * stride;
    const auto visible = [&](int64_t key) {
      key += r % args.rows;
      return key < 0 ? 0 : (key < args.count ? key : args.count);
    };
    if (logits.cap_scale > 0.0F) cap_row(row, logits.cap_scale, args.count);
    exponentiate_row<Float32Products, false>(row, row, logits.scale, visible(args.begin),
                                             visible(args.limit), stride, args.m + r, args.l + r);
  }
  __builtin_memset(sums, 0, rows * value_dims * sizeof(float));
  for_panels(args.values, args.value_stride, args.value_dim, [&](int64_t j, int64_t n, Blocks v) {
    for_rows(rows, [&]<int kN>(int64_t r) {
      multiply_values<kType, kN>(z + r * stride + j, stride, v, n, sums + r * value_dims,
                                 value_dims);
    });
  });
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; kType == DType::kBFloat16 && d < value_dims; d += kBlock) {
      float* block = sums + r * value_dims + d;
      const Vec even = load(block), odd = load(block + kLanes);
      store(block, zip<0>(even, odd));
      store(block + kLanes, zip<1>(even, odd));
    }
    __builtin_memcpy(args.out + r * args.value_dim, sums + r * value_dims,
                     args.value_dim * sizeof(float));
  }
}

}  // namespace

void attend_token(const AttendTokenArgs& args) {
  if (args.dtype == DType::kFloat32) return attend_group<DType::kFloat32>(args);
  if (args.dtype == DType::kBFloat16) return attend_group<DType::kBFloat16>(args);
  attend_group<DType::kFloat16>(args);
}

}  // namespace h2o_prefill::H2O_ISA
