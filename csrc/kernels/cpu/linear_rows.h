// Feature maps, decays and sums over rows of linear attention, and its way token by token.
#pragma once

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/linear_chunk.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/tile.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::H2O_ISA {

using Products = Float32Products;

// A multiple of a cache line, so that parts begin on one.
H2O_INLINE int64_t whole_lines(int64_t floats) { return pad_to(floats, 16); }

// e^max(x, -87.3) for x <= 0, relative error under 2e-7 where products are fused with sums; a NaN
// stays one. The product with log2(e) needs no instruction of its own.
H2O_INLINE Vec exp_nonpositive(Vec x) {
  const Vec clamped = max(broadcast(-87.33654F), x);
  const Vec shifted = clamped * kLog2E + kRoundingShift;
  return exp2_of_parts<5>(shifted, clamped * kLog2E - (shifted - kRoundingShift));
}

H2O_INLINE float exp_nonpositive(float x) { return exp_nonpositive(broadcast(x))[0]; }

// x[i] = exp(x[i]), of whole vectors.
H2O_INLINE void exponentiate(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, exp_nonpositive(load(x + i)));
}

// to_end[j]: decay from row j to the last row, 1 in the padding. Returns the sum of the log decays.
H2O_INLINE float fill_to_end(const float* log_decay, int64_t stride, int64_t rows, float* to_end) {
  const int64_t padded = pad_to(rows, kPanel);
  float total = 0.0F;
  for (int64_t j = padded; j-- > 0;) {
    to_end[j] = total;
    if (j < rows) total += log_decay[j * stride];
  }
  exponentiate(to_end, padded, to_end);
  return total;
}

// A NaN stays one.
H2O_INLINE Vec map_feature(Vec x, FeatureMap feature_map) {
  const Vec zero = Vec{};
  if (feature_map == FeatureMap::kRelu) return max(zero, x);
  // On either side of 0 one of the two terms has its value at 0, exactly 0 or 1.
  return max(zero, x) + exp_nonpositive(min(zero, x));
}

// out = features of x[0 .. n), in whole vectors.
H2O_INLINE void map_features(FeatureMap feature_map, int64_t n, const float* x, float* out) {
  if (feature_map == FeatureMap::kIdentity) {
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
  } else {
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, map_feature(load(x + i), feature_map));
  }
}

H2O_INLINE void map_features(FeatureMap feature_map, int64_t n, float* x) {
  if (feature_map != FeatureMap::kIdentity) map_features(feature_map, n, x, x);
}

// out = exp(log_decay) * start + sum, in whole vectors; out may be sum.
H2O_INLINE void add_decayed(const float* start, float log_decay, int64_t floats, const float* sum,
                            float* out) {
  const Vec decay = broadcast(exp_nonpositive(log_decay));
  for (int64_t i = 0; i < floats; i += kLanes) {
    store(out + i, load(start + i) * decay + load(sum + i));
  }
}

// The packed state before a chunk, in the direction of the walk; null: zero. scratch: [floats].
H2O_INLINE const float* state_before(const LinearChunkArgs& args, int64_t floats, float* scratch) {
  if (args.sum_is_zero) return args.start;
  if (!args.start) return args.sum;
  add_decayed(args.start, args.start_log_decay, floats, args.sum, scratch);
  return scratch;
}

// n is a multiple of the vector length.
H2O_INLINE float sum_of(const float* x, int64_t n) {
  Vec sum = Vec{};
  for (int64_t i = 0; i < n; i += kLanes) sum += load(x + i);
  return reduce_add(sum);
}

H2O_INLINE float dot(const float* a, const float* b, int64_t n) {
  Vec sum = Vec{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = load(a + i) * load(b + i) + sum;
  float total = reduce_add(sum);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// data[offset + i] = row[i] * factor. past_caches: the tensor is large and not read soon, so whole
// lines are written without reading them first. buffer: [dim], whole vectors.
H2O_INLINE void write_row(const float* row, int64_t dim, float factor, void* data, DType dtype,
                          int64_t offset, bool past_caches, float* buffer) {
  char* const out = static_cast<char*>(data) + offset * size_of(dtype);
  const int64_t bytes = dim * size_of(dtype);
  if (!past_caches || bytes % kVectorBytes || reinterpret_cast<uintptr_t>(out) % kVectorBytes) {
    store_floats(row, dim, factor, data, dtype, offset);
    return;
  }
  if (dtype == DType::kFloat32) {
    const Vec factors = broadcast(factor);
    for (int64_t i = 0; i < dim; i += kLanes) stream(out + i * 4, load(row + i) * factors);
    return;
  }
  store_floats(row, dim, factor, buffer, dtype, 0);
  for (int64_t i = 0; i < bytes; i += kVectorBytes) stream(out + i, load(buffer + i / 4));
}

// See LinearKernels.
void linear_tokens(const LinearChunkArgs& args, const LinearStates& states);
int64_t token_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads);

}  // namespace h2o_prefill::H2O_ISA
