// The column sums that every kernel of them is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/cuda/attention.h"

namespace h2o_prefill::testing {

struct Sums {
  std::vector<float> lse;    // [B, Hq, T]
  std::vector<double> sums;  // [B, Hkv, keys], of every position
};

// By the definition. Rows for which `skipped` holds have lse -inf.
inline Sums expect_sums(const AttentionInputs& in, const VisibleKeys& visible, bool reduce_max,
                        const std::function<bool(int64_t)>& skipped) {
  const int64_t keys = in.key.length, group = in.group();
  Sums expected;
  expected.sums.resize(in.key.batch * in.key.heads * keys);
  for (int64_t b = 0; b < in.query.batch; ++b) {
    for (int64_t head = 0; head < in.query.heads; ++head) {
      const int64_t h = head / group;
      std::vector<double> of_head(keys);
      for (int64_t t = 0; t < in.query.length; ++t) {
        const std::vector<int64_t> positions = visible(b, h, t);
        const std::vector<double> z = logits(in, b, head, t, positions);
        const double lse = skipped(t) ? -HUGE_VAL : log_sum_exp(z);
        expected.lse.push_back(static_cast<float>(lse));
        if (skipped(t)) continue;
        for (size_t j = 0; j < z.size(); ++j) of_head[positions[j]] += std::exp(z[j] - lse);
      }
      for (int64_t j = 0; j < keys; ++j) {
        double& sum = expected.sums[(b * in.key.heads + h) * keys + j];
        sum = reduce_max ? std::max(sum, of_head[j]) : sum + of_head[j];
      }
    }
  }
  return expected;
}

}  // namespace h2o_prefill::testing
