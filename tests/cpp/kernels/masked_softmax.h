// Attention of one row by its definition, in float64: one softmax over the keys that it sees.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace h2o_prefill::testing {

inline double capped(double logit, double softcap) {
  return softcap > 0.0 ? softcap * std::tanh(logit / softcap) : logit;
}

struct Softmax {
  double lse;  // -inf: no keys, and no sink
  std::vector<double> probabilities = {};
};

// The sink is one more logit, of no key.
inline Softmax softmax(const std::vector<double>& logits, double sink = -HUGE_VAL) {
  Softmax row;
  double offset = sink;
  for (const double x : logits) offset = std::max(offset, x);
  double sum = sink == -HUGE_VAL ? 0.0 : std::exp(sink - offset);
  for (const double x : logits) sum += std::exp(x - offset);
  row.lse = sum == 0.0 ? -HUGE_VAL : offset + std::log(sum);
  for (const double x : logits) row.probabilities.push_back(std::exp(x - row.lse));
  return row;
}

}  // namespace h2o_prefill::testing
