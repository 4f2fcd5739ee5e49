// Softmax attention of one row to keys that are not packed, as decoding has it: all heads of a
// group at once, so that each key and value is read once. Compiled once per instruction set.
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/softmax_rows.h"

namespace h2o_prefill::H2O_ISA {
namespace {

static_assert(kPanel <= AttendTokenArgs::kWidestPanel, "scratch has room for a panel");

// Vectors of the values of a pass: their sums, for the heads that share it, stay in registers.
constexpr int kHeads = AttendTokenArgs::kHeads;
constexpr int kColumns = kLanes == 16 ? 4 : 2;

// Elements [i, i + kLanes) of a row of `dim`, zero after its end.
template <DType kType>
H2O_INLINE Vec load_lanes(const void* data, int64_t offset, int64_t i, int64_t dim) {
  if (i + kLanes <= dim) {
    if constexpr (kType == DType::kFloat32) {
      return load(static_cast<const float*>(data) + offset + i);
    } else if constexpr (kType == DType::kBFloat16) {
      return load_bfloat16(static_cast<const uint16_t*>(data) + offset + i);
#ifdef H2O_FLOAT16_VECTORS
    } else {
      return load_float16(static_cast<const uint16_t*>(data) + offset + i);
#endif
    }
  }
  float lanes[kLanes] = {};
  load_floats(data, kType, offset + i, i + kLanes <= dim ? kLanes : dim - i, 1.0F, lanes);
  return load(lanes);
}

// Products z[h, j] of kN heads with keys [j, j + kLanes); `count` exist.
template <DType kType, int kN>
H2O_INLINE void multiply_keys(const AttendTokenArgs& args, const float* query, int64_t j,
                              int64_t count, float* z, int64_t stride) {
  const int64_t dims = pad_to(args.head_dim, kLanes);
  Vec products[kN][kLanes];
  for (int64_t key = count; key < kLanes; ++key) {
    for (int h = 0; h < kN; ++h) products[h][key] = Vec{};
  }
  for (int64_t key = 0; key < count; ++key) {
    Vec sum[kN] = {};
    for (int64_t d = 0; d < dims; d += kLanes) {
      const Vec x = load_lanes<kType>(args.keys, (j + key) * args.key_stride, d, args.head_dim);
#pragma GCC unroll 4
      for (int h = 0; h < kN; ++h) sum[h] = load(query + h * dims + d) * x + sum[h];
    }
    for (int h = 0; h < kN; ++h) products[h][key] = sum[h];
  }
  for (int h = 0; h < kN; ++h) {
    transpose(products[h]);
    Vec total = products[h][0];
    for (int i = 1; i < kLanes; ++i) total += products[h][i];
    store(z + h * stride + j, total);
  }
}

// out[h, d] = sum over keys of p[h, j] value[j, d], for kN heads and kColumns vectors of d.
template <DType kType, int kN>
H2O_INLINE void multiply_values(const AttendTokenArgs& args, const float* p, int64_t stride,
                                int64_t d, float* out) {
  Vec sum[kN][kColumns] = {};
  for (int64_t j = 0; j < args.count; ++j) {
    Vec x[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const int64_t first = d + c * kLanes;
      x[c] = first < args.value_dim
                 ? load_lanes<kType>(args.values, j * args.value_stride, first, args.value_dim)
                 : Vec{};
    }
#pragma GCC unroll 4
    for (int h = 0; h < kN; ++h) {
      const Vec weight = broadcast(p[h * stride + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[h][c] = weight * x[c] + sum[h][c];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kN; ++h) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      for (int i = 0; i < kLanes && d + c * kLanes + i < args.value_dim; ++i) {
        out[h * args.value_dim + d + c * kLanes + i] = sum[h][c][i];
      }
    }
  }
}

template <DType kType, int kN>
void attend_heads(const AttendTokenArgs& args, int64_t head) {
  const int64_t dims = pad_to(args.head_dim, kLanes);
  const int64_t stride = pad_to(args.count, kPanel);
  float* query = args.scratch;
  float* z = query + kHeads * dims;
  const LogitScale logits = logit_scale(args.scale, args.softcap);
  for (int h = 0; h < kN; ++h) {
    const int64_t offset = (head + h) * args.query_stride;
    for (int64_t d = 0; d < dims; d += kLanes) {
      const Vec x = load_lanes<kType>(args.query, offset, d, args.head_dim);
      store(query + h * dims + d, x * logits.sign);
    }
  }
  for (int64_t j = 0; j < args.count; j += kLanes) {
    const int64_t count = args.count - j < kLanes ? args.count - j : kLanes;
    multiply_keys<kType, kN>(args, query, j, count, z, stride);
  }
  for (int h = 0; h < kN; ++h) {
    float* row = z + h * stride;
    if (logits.cap_scale > 0.0F) cap_row(row, logits.cap_scale, args.count);
    exponentiate_row<Float32Products, false>(row, row, logits.scale, 0, args.count, stride,
                                             args.m + head + h, args.l + head + h);
  }
  for (int64_t d = 0; d < args.value_dim; d += kColumns * kLanes) {
    multiply_values<kType, kN>(args, z, stride, d, args.out + head * args.value_dim);
  }
}

template <DType kType>
void attend_group(const AttendTokenArgs& args) {
  int64_t head = 0;
  for (; head + kHeads <= args.heads; head += kHeads) attend_heads<kType, kHeads>(args, head);
  for (; head + 3 <= args.heads; head += 3) attend_heads<kType, 3>(args, head);
  for (; head < args.heads; ++head) attend_heads<kType, 1>(args, head);
}

}  // namespace

void attend_token(const AttendTokenArgs& args) {
  if (args.dtype == DType::kFloat32) return attend_group<DType::kFloat32>(args);
  if (args.dtype == DType::kBFloat16) return attend_group<DType::kBFloat16>(args);
  attend_group<DType::kFloat16>(args);
}

}  // namespace h2o_prefill::H2O_ISA
