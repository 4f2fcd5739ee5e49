// bfloat16 and float16 as bits, to and from float32; rounding is to nearest, ties to even.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace h2o_prefill {

H2O_INLINE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
H2O_INLINE uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

H2O_INLINE float bfloat16_to_float(uint16_t x) {
  return bits_to_float(static_cast<uint32_t>(x) << 16);
}

H2O_INLINE uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40U);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// The 10 mantissa and 5 exponent bits are moved to float32's positions; the product with 2^112
// corrects the exponent's bias, subnormals included.
H2O_INLINE float float16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000U) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7FFFU) << 13;
  const bool special = (x & 0x7C00U) == 0x7C00U;  // inf or NaN
  const float scaled = bits_to_float(magnitude) * bits_to_float(0x77800000U);
  const uint32_t bits = special ? (magnitude | 0x7F800000U) : float_to_bits(scaled);
  return bits_to_float(sign | bits);
}

H2O_INLINE uint16_t float_to_float16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;   // NaN
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // rounds to 65536 or more: inf
  if (magnitude < 0x38800000U) {
    // Subnormal in float16: adding 0.5 puts its last bit, 2^-24, at the end of the float's
    // mantissa, rounded.
    const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5F) - float_to_bits(0.5F);
    return sign | static_cast<uint16_t>(rounded);
  }
  const uint32_t odd = (magnitude >> 13) & 1U;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000U + 0xFFFU + odd) >> 13);
}

}  // namespace h2o_prefill
