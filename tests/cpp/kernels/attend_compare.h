// How far what a kernel gave may be from the answer.
#pragma once

#include <cstdio>

#include "kernels/attend_oracle.h"
#include "kernels/attend_run.h"

namespace h2o_prefill::testing {

constexpr double kTolerance = 1e-5;

// Empty if |got(i) - expected(i)| <= tolerance(i) for all i < n; infinities and NaN must agree.
// Otherwise the first entry that is further away, in words.
template <typename Got, typename Expected, typename Tolerance>
std::string difference(int64_t n, const Got& got, const Expected& expected,
                       const Tolerance& tolerance) {
  for (int64_t i = 0; i < n; ++i) {
    const double a = got(i), b = expected(i);
    if (a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance(i)) continue;
    char text[160];
    std::snprintf(text, sizeof(text), "entry %d of %d is %.9g, expected %.9g, tolerance %.3g",
                  static_cast<int>(i), static_cast<int>(n), a, b, tolerance(i));
    return text;
  }
  return "";
}

// Relative tolerance of logarithms and of sums of probabilities.
inline double relative(double expected) { return kTolerance * std::max(1.0, std::fabs(expected)); }

// Values are at most 1. Probabilities that are multiplied as bfloat16 are rounded to it.
inline std::string out_difference(const CpuKernels& kernels, const Problem& problem,
                                  const Answer& answer, const Outcome& run) {
  const ProblemSpec& spec = problem.spec;
  const double of_out = rounding(spec.out_dtype);
  const double of_weight =
      kernels.elements_per_word(spec.dtype) == 2 ? rounding(DType::kBFloat16) : 0.0;
  const std::vector<double> out = run.out.numbers();
  return difference(
      spec.rows * spec.value_dim, [&](int64_t i) { return out[i]; },
      [&](int64_t i) { return answer.out[i]; },
      [&](int64_t i) {
        return kTolerance + of_out * std::fabs(answer.out[i]) + of_weight * answer.weight[i];
      });
}

inline std::string lse_difference(const Answer& answer, const Outcome& run) {
  return difference(
      run.lse.size(), [&](int64_t r) { return run.lse[r]; },
      [&](int64_t r) { return answer.lse[r]; }, [&](int64_t r) { return relative(answer.lse[r]); });
}

// Column sums are added to what was there; those that are not wanted stay.
inline std::string colsum_difference(const Problem& problem, const Answer& answer,
                                     const Outcome& run) {
  for (size_t s = 0; s < problem.sets.size(); ++s) {
    const SetSpec& set = problem.sets[s].spec;
    const auto expected = [&](int64_t j) {
      return colsum_before(j) + (set.wants_colsum ? answer.colsum[s][j] : 0.0);
    };
    const std::string wrong = difference(
        set.count, [&](int64_t j) { return run.colsum[s][j]; }, expected,
        [&](int64_t j) { return relative(expected(j)); });
    if (!wrong.empty()) return std::string("set ") + std::to_string(s) + ": " + wrong;
  }
  return "";
}

}  // namespace h2o_prefill::testing
