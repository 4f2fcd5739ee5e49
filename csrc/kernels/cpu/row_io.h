// Rows of tensors of any dtype, to and from the words that tiles multiply.
#pragma once

#include "kernels/cpu/float16.h"
#include "kernels/cpu/products.h"
#include "kernels/params.h"

namespace h2o_prefill::H2O_ISA {

#ifndef H2O_FLOAT16_VECTORS
H2O_INLINE Vec load_float16(const uint16_t* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = float16_to_float(p[i]);
  return load(lanes);
}
#endif

// row[i] = x[i] * factor.
H2O_INLINE void load_floats(const void* data, DType dtype, int64_t offset, int64_t n, float factor,
                            float* row) {
  if (dtype == DType::kFloat32) {
    const float* x = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) row[i] = x[i] * factor;
  } else if (dtype == DType::kBFloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) row[i] = bfloat16_to_float(x[i]) * factor;
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(row + i, load_float16(x + i) * factor);
    for (; i < n; ++i) row[i] = float16_to_float(x[i]) * factor;
  }
}

// The same as words: neighbours pair up, the last of an odd number with zero.
template <typename Products>
H2O_INLINE void load_words(const void* data, DType dtype, int64_t offset, int64_t n, float factor,
                           float* row) {
  if constexpr (Products::kPerWord == 1) {
    load_floats(data, dtype, offset, n, factor, row);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
    HalfWord* halves = reinterpret_cast<HalfWord*>(row);
    if (factor == 1.0F) {
      for (int64_t i = 0; i < n; ++i) halves[i] = x[i];
    } else {
      for (int64_t i = 0; i < n; ++i)
        halves[i] = float_to_bfloat16(bfloat16_to_float(x[i]) * factor);
    }
    if (n % 2) halves[n] = 0;
  }
}

// x[i] = row[i] * factor.
H2O_INLINE void store_floats(const float* row, int64_t n, float factor, void* data, DType dtype,
                             int64_t offset) {
  if (dtype == DType::kFloat32) {
    float* x = static_cast<float*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) x[i] = row[i] * factor;
  } else if (dtype == DType::kBFloat16) {
    uint16_t* x = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) x[i] = float_to_bfloat16(row[i] * factor);
  } else {
    uint16_t* x = static_cast<uint16_t*>(data) + offset;
    int64_t i = 0;
#ifdef H2O_FLOAT16_VECTORS
    for (; i + kLanes <= n; i += kLanes) store_float16(x + i, load(row + i) * factor);
#endif
    for (; i < n; ++i) x[i] = float_to_float16(row[i] * factor);
  }
}

// Prefetches a row, for reading (0) or writing (1).
template <int kWrite>
H2O_INLINE void prefetch_row(const void* data, DType dtype, int64_t offset, int64_t n) {
  constexpr int64_t kCacheLine = 64;
  const char* row = static_cast<const char*>(data) + offset * size_of(dtype);
  for (int64_t byte = 0; byte < n * size_of(dtype); byte += kCacheLine) {
    __builtin_prefetch(row + byte, kWrite, 3);
  }
}

}  // namespace h2o_prefill::H2O_ISA
