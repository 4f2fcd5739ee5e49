// The one definition of how partial softmax results are finished and fused.
//
// A partial result over a key set is a maximum m of the logits, the denominator l = sum of exp(z -
// m), and the numerator o = sum of exp(z - m) v. Kernels keep logits in base 2 (z times log2(e)),
// so that an exponential is one exp2; lse leaves a kernel as a natural logarithm. A row without
// keys has m = -inf, l = 0, o = 0: output 0, lse -inf.
#pragma once

#include "kernels/host_device.h"

namespace h2o_prefill {

constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kLn2 = 0.69314718055994530942F;
constexpr float kNegInf = -__builtin_inff();

// Factors that bring two partial results to the common maximum m.
struct MergeFactors {
  float m;
  float a;
  float b;
};

// (m_a, .) with (m_b, .), logits in base 2. An empty side gets factor 0; exp2 never sees -inf minus
// -inf.
H2O_HOST_DEVICE MergeFactors merge_factors(float m_a, float m_b) {
  const float m = m_a > m_b ? m_a : m_b;
  if (m == kNegInf) return {m, 0.0F, 0.0F};
  const float a = m_a == kNegInf ? 0.0F : __builtin_exp2f(m_a - m);
  const float b = m_b == kNegInf ? 0.0F : __builtin_exp2f(m_b - m);
  return {m, a, b};
}

// 1 / l, and 0 for an empty row. A NaN stays one.
H2O_HOST_DEVICE float inverse_denominator(float l) { return l == 0.0F ? 0.0F : 1.0F / l; }

// Natural logarithm of the denominator, for logits in base 2.
H2O_HOST_DEVICE float natural_lse(float m, float l) {
  return l == 0.0F ? kNegInf : (m + __builtin_log2f(l)) * kLn2;
}

// Finishes a row: the factor of its numerator, and its natural lse.
struct FinishedRow {
  float weight;
  float lse;
};

// (m, l) with a sink, a logit in base 2 that counts in the denominator only; -inf: none.
H2O_HOST_DEVICE FinishedRow finish_row(float m, float l, float sink) {
  if (sink == kNegInf) return {inverse_denominator(l), natural_lse(m, l)};
  const MergeFactors factors = merge_factors(m, sink);
  const float total = l * factors.a + factors.b;
  return {factors.a * inverse_denominator(total), natural_lse(factors.m, total)};
}

// Merges two finished results: the weights of their outputs, and the natural lse of both.
struct MergeWeights {
  float a;
  float b;
  float lse;
};

H2O_HOST_DEVICE MergeWeights merge_weights(float lse_a, float lse_b) {
  const MergeFactors factors = merge_factors(lse_a * kLog2E, lse_b * kLog2E);
  const float total = factors.a + factors.b;
  const float inverse = inverse_denominator(total);
  return {factors.a * inverse, factors.b * inverse, natural_lse(factors.m, total)};
}

}  // namespace h2o_prefill
