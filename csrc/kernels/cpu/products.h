// How rows are multiplied: in float32, or as pairs of bfloat16.
//
// Packed rows, queries and probabilities consist of words of 32 bits. A word is one float32, or a
// pair of bfloat16 whose two products are added to one float32. Both kinds go through the same
// tiles; a pair needs half as many words. Buffers of words have the type float, whatever is in
// them.
#pragma once

#include "kernels/cpu/float16.h"
#include "kernels/cpu/simd.h"
#include "kernels/params.h"

namespace h2o_prefill::H2O_ISA {

typedef uint32_t Word __attribute__((may_alias));
typedef uint16_t HalfWord __attribute__((may_alias));

struct Float32Products {
  static constexpr int kPerWord = 1;

  static H2O_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) { return a * b + acc; }

  // Probabilities of kPerWord vectors of keys as one vector of words.
  static H2O_INLINE Vec join(const Vec* p) { return p[0]; }
};

#ifdef __AVX512BF16__

// Products of bfloat16 are exact in float32; subnormal numbers count as zero. Within a group of two
// vectors of keys, word i pairs key i with key i + kLanes, so that probabilities need no shuffling.
struct BFloat16Products {
  static constexpr int kPerWord = 2;

  static H2O_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  // Rounds to nearest, ties away from zero: p is in [0, 1] or NaN.
  static H2O_INLINE Vec join(const Vec* p) {
    const UintVec half = UintVec{} + 0x8000U;
    const UintVec low = (reinterpret_cast<UintVec>(p[0]) + half) >> 16;
    const UintVec high = (reinterpret_cast<UintVec>(p[1]) + half) & 0xFFFF0000U;
    return reinterpret_cast<Vec>(low | high);
  }
};

#endif

// Calls f with the kind of products that rows of this dtype go through.
template <typename Function>
H2O_INLINE void with_products(DType dtype, const Function& f) {
#ifdef __AVX512BF16__
  if (dtype == DType::kBFloat16) return f(BFloat16Products{});
#endif
  (void)dtype;
  f(Float32Products{});
}

}  // namespace h2o_prefill::H2O_ISA
