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
  using Element = float;
  static constexpr int kPerWord = 1;
  static constexpr int kExp2Degree = 5;

  static H2O_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) { return a * b + acc; }

  // Writes the probabilities of two vectors of keys as words.
  static H2O_INLINE void store_words(float* words, const Vec (&p)[2]) {
    store(words, p[0]);
    store(words + kLanes, p[1]);
  }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kBFloat16Products = true;

// Products of bfloat16 are exact in float32; subnormal numbers count as zero.
struct BFloat16Products {
  using Element = HalfWord;
  static constexpr int kPerWord = 2;
  // Probabilities are rounded to bfloat16: the polynomial's error matters in the lse alone.
  static constexpr int kExp2Degree = 4;

  static H2O_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    return vbfdotq_f32(acc, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
#endif
  }

  static H2O_INLINE void store_words(float* words, const Vec (&p)[2]) {
#ifdef __AVX512BF16__
    store(words, reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(p[1], p[0])));
#else
    store(words, reinterpret_cast<Vec>(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(p[0]), p[1])));
#endif
  }
};

#else
constexpr bool kBFloat16Products = false;
using BFloat16Products = Float32Products;  // not taken
#endif

// Words of n elements.
template <typename Products>
H2O_INLINE int64_t words_of(int64_t n) {
  return (n + Products::kPerWord - 1) / Products::kPerWord;
}

// Calls f with the kind of products that rows of this dtype go through.
template <typename Function>
H2O_INLINE void with_products(DType dtype, const Function& f) {
  if (kBFloat16Products && dtype == DType::kBFloat16) return f(BFloat16Products{});
  f(Float32Products{});
}

}  // namespace h2o_prefill::H2O_ISA
