// Vectors of float32, as wide as the instruction set that this translation unit is compiled for.
//
// Written with the vector types of GCC and Clang, so that one source serves AVX-512, AVX2, NEON and
// the compiler's baseline; a * b + c becomes one fused instruction where there is one (compile with
// -ffp-contract=fast). Everything is in the namespace H2O_ISA, one per instruction set, and
// includes nothing of the standard library: an inline function compiled here with wide instructions
// must never be the copy that the linker keeps for others.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef H2O_ISA
#error "H2O_ISA must name the instruction set, as in -DH2O_ISA=avx2"
#endif

namespace h2o_prefill::H2O_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
// 16 of 32 registers accumulate: enough to hide the latency of two FMA units.
constexpr int kTileRows = 8;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
// 12 of 16 registers accumulate, two hold keys, one a broadcast query.
constexpr int kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
// 16 of 32 registers accumulate.
constexpr int kTileRows = 8;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 6;
#endif

constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UintVec __attribute__((vector_size(kVectorBytes)));
typedef float UnalignedVec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

H2O_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
H2O_INLINE void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

// kLanes values of float16, rounded to nearest. The unmasked intrinsics of AVX-512 make GCC 12 warn
// of uninitialised values in its own header.
#if defined(__AVX512F__)
#define H2O_FLOAT16_VECTORS
H2O_INLINE Vec load_float16(const uint16_t* p) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
H2O_INLINE void store_float16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xFFFF, x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
#define H2O_FLOAT16_VECTORS
H2O_INLINE Vec load_float16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
H2O_INLINE void store_float16(uint16_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
#define H2O_FLOAT16_VECTORS
H2O_INLINE Vec load_float16(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
H2O_INLINE void store_float16(uint16_t* p, Vec x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
#endif

H2O_INLINE Vec load_bfloat16(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<Vec>(
      _mm512_maskz_slli_epi32(0xFFFF, _mm512_maskz_cvtepu16_epi32(0xFFFF, x), 16));
#else
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
  const auto x = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), UintVec);
  return reinterpret_cast<Vec>(x << 16);
#endif
}

H2O_INLINE Vec load_int8(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtepi8_epi32(0xFFFF, x));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Vec);
#endif
}

H2O_INLINE Vec broadcast(float x) { return x - Vec{}; }

// x stays in a register until here; with AVX, where sums take nearly all of them.
H2O_INLINE void keep_register([[maybe_unused]] Vec x) {
#if defined(__AVX__)
  __asm__("" : : "v"(x));
#endif
}

// a > b ? a : b and a < b ? a : b: of a NaN and a number, b. As one instruction, which GCC does not
// always find.
#if defined(__AVX512F__)
H2O_INLINE Vec max(Vec a, Vec b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
H2O_INLINE Vec min(Vec a, Vec b) { return _mm512_maskz_min_ps(0xFFFF, a, b); }
#elif defined(__AVX__)
H2O_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
H2O_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
#else
H2O_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
H2O_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#endif

// Writes past the caches where there is an instruction for it, to an address of whole vectors;
// stream_end() orders these writes before all later ones.
H2O_INLINE void stream(void* p, Vec x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(static_cast<float*>(p), x);
#elif defined(__AVX__)
  _mm256_stream_ps(static_cast<float*>(p), x);
#else
  store(static_cast<float*>(p), x);
#endif
}
H2O_INLINE void stream_end() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// f(0), ..., f(kLanes - 1), as the arguments of a shuffle.
#define H2O_LANES_4(f, i) f(i), f(i + 1), f(i + 2), f(i + 3)
#if defined(__AVX512F__)
#define H2O_LANES(f) H2O_LANES_4(f, 0), H2O_LANES_4(f, 4), H2O_LANES_4(f, 8), H2O_LANES_4(f, 12)
#elif defined(__AVX__)
#define H2O_LANES(f) H2O_LANES_4(f, 0), H2O_LANES_4(f, 4)
#else
#define H2O_LANES(f) H2O_LANES_4(f, 0)
#endif

// 0, ..., kLanes - 1.
H2O_INLINE IntVec lane_numbers() {
#define H2O_NUMBER(i) i
  return IntVec{H2O_LANES(H2O_NUMBER)};
#undef H2O_NUMBER
}

// Lane i of the result is lane i + kBy of x, cyclically.
template <int kBy>
H2O_INLINE Vec rotate(Vec x) {
#define H2O_FROM(i) ((i) + kBy) % kLanes
  return __builtin_shufflevector(x, x, H2O_LANES(H2O_FROM));
#undef H2O_FROM
}

// The lanes of a and b in turns, of their lower (0) or upper (1) halves.
template <int kHalf>
H2O_INLINE Vec zip(Vec a, Vec b) {
#define H2O_FROM(i) (i) / 2 + kHalf*(kLanes / 2) + (i) % 2 * kLanes
  return __builtin_shufflevector(a, b, H2O_LANES(H2O_FROM));
#undef H2O_FROM
}

// Lane j of x[i] and lane i of x[j] are swapped: each round of zips moves one bit of the row
// number into the lane number.
H2O_INLINE void transpose(Vec (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Vec y[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      y[2 * i] = zip<0>(x[i], x[i + kLanes / 2]);
      y[2 * i + 1] = zip<1>(x[i], x[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// Lanes whose number has the bit kBit come from b, the others from a, each plus the one beside it
// by that bit.
template <int kBit>
H2O_INLINE Vec add_beside(Vec a, Vec b) {
#define H2O_FROM(i) (i) ^ kBit
  const IntVec of_b = (lane_numbers() & kBit) != 0;
  const Vec beside = of_b ? a : b;
  return (of_b ? b : a) + __builtin_shufflevector(beside, beside, H2O_LANES(H2O_FROM));
#undef H2O_FROM
}

// Lane i of the result is the sum of the lanes of x[i], which is changed.
template <int kBit = kLanes / 2>
H2O_INLINE Vec add_lanes(Vec (&x)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kBit; ++i) x[i] = add_beside<kBit>(x[i], x[i + kBit]);
  if constexpr (kBit > 1) return add_lanes<kBit / 2>(x);
  return x[0];
}

H2O_INLINE float reduce_max(Vec x) {
  if constexpr (kLanes == 16) x = max(x, rotate<8>(x));
  if constexpr (kLanes >= 8) x = max(x, rotate<4>(x));
  x = max(x, rotate<2>(x));
  return max(x, rotate<1>(x))[0];
}

H2O_INLINE float reduce_add(Vec x) {
  if constexpr (kLanes == 16) x += rotate<8>(x);
  if constexpr (kLanes >= 8) x += rotate<4>(x);
  x += rotate<2>(x);
  return (x + rotate<1>(x))[0];
}

// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
constexpr float kRoundingShift = 12582912.0F;

// 2^f for f in [-1/2, 1/2]: the polynomial of this degree with p(0) = 1 whose largest relative
// error is least (Remez), 2.8e-6 or 9.2e-8.
template <int kDegree>
H2O_INLINE Vec exp2_of_fraction(Vec f) {
  static_assert(kDegree == 4 || kDegree == 5, "there are coefficients for these");
  Vec p;
  if constexpr (kDegree == 4) {
    p = broadcast(9.5828529242948119e-3F);
    p = p * f + 5.5906424770261316e-2F;
    p = p * f + 2.4024098615015740e-1F;
    p = p * f + 6.9312419338690079e-1F;
  } else {
    p = broadcast(1.3264727247198130e-3F);
    p = p * f + 9.6715126881532943e-3F;
    p = p * f + 5.5507337435739754e-2F;
    p = p * f + 2.4022242084635073e-1F;
    p = p * f + 6.9314697759871590e-1F;
  }
  return p * f + 1.0F;
}

// 2^(n + f) with f as above and n + kRoundingShift as `shifted`: n is added to the exponent bits.
template <int kDegree>
H2O_INLINE Vec exp2_of_parts(Vec shifted, Vec f) {
  // The shift's own bits are shifted out.
  const IntVec n = reinterpret_cast<IntVec>(shifted) << 23;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(exp2_of_fraction<kDegree>(f)) + n);
}

// 2^max(x, -126) for x <= 0, with the polynomial's error and 1e-7; a NaN stays one.
template <int kDegree>
H2O_INLINE Vec exp2_nonpositive(Vec x) {
  const Vec clamped = max(broadcast(-126.0F), x);  // of a NaN and a number the second is taken
#if defined(__AVX512F__)
  const Vec n = _mm512_maskz_roundscale_ps(0xFFFF, clamped, _MM_FROUND_TO_NEAREST_INT);
  return _mm512_maskz_scalef_ps(0xFFFF, exp2_of_fraction<kDegree>(clamped - n), n);
#else
  const Vec shifted = clamped + kRoundingShift;
  return exp2_of_parts<kDegree>(shifted, clamped - (shifted - kRoundingShift));
#endif
}

// tanh, relative error under 3e-7; a NaN stays one.
// x p(x^2) / q(x^2) with q(0) = 1, whose largest relative error on [0, 8] is least (Remez), 6.5e-9;
// beyond, tanh is 1 to float32.
H2O_INLINE Vec tanh(Vec x) {
  const Vec end = broadcast(8.0F);
  const Vec clamped = min(end, max(-end, x));
  const Vec u = clamped * clamped;
  Vec p = broadcast(1.5230378308605194e-8F);
  p = p * u + 2.1894633766876314e-5F;
  p = p * u + 3.5715963119681300e-3F;
  p = p * u + 1.3444496535160144e-1F;
  p = p * u + 9.9999999356797860e-1F;
  Vec q = broadcast(8.5224305887467330e-7F);
  q = q * u + 3.4112892187264100e-4F;
  q = q * u + 2.6164436414625288e-2F;
  q = q * u + 4.6777823853920647e-1F;
  q = q * u + 1.0F;
  return clamped * p / q;
}

}  // namespace h2o_prefill::H2O_ISA
