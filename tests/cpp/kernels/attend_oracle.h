// The answer to a problem in float64, by the definition: no maximum is subtracted, nothing is
// blocked, packed or merged. A double holds the exponential of any logit that a test makes.
#pragma once

#include "kernels/attend_problem.h"

namespace h2o_prefill::testing {

struct Answer {
  std::vector<double> out;                  // [rows, value_dim]
  std::vector<double> weight;               // the same with |value|: what errors are measured by
  std::vector<double> lse;                  // [rows]
  std::vector<std::vector<double>> colsum;  // [sets][count]
};

// exp(scale query[row] . key[j]) of all keys that the row sees, under the cap.
inline std::vector<double> exponentials(const Problem& problem, const std::vector<double>& query,
                                        const ProblemSet& set, const std::vector<double>& keys,
                                        int64_t row) {
  const int64_t dim = problem.spec.head_dim;
  std::vector<double> result;
  for (int64_t j = 0; j < set.limit(row); ++j) {
    double sum = 0.0;
    for (int64_t d = 0; d < dim; ++d) {
      sum += query[row * dim + d] * keys[set.source_row(j) * dim + d];
    }
    const double logit = problem.spec.scale * sum;
    const double cap = problem.spec.softcap;
    result.push_back(std::exp(cap > 0.0 ? cap * std::tanh(logit / cap) : logit));
  }
  return result;
}

// One softmax a row over what it sees in all sets; column sums by one softmax a row and set. The
// sink is in the denominators of both.
inline Answer solve(const Problem& problem) {
  const int64_t rows = problem.spec.rows, dim = problem.spec.value_dim;
  Answer answer;
  answer.out.resize(rows * dim);
  answer.weight.resize(rows * dim);
  const std::vector<double> query = problem.query.numbers();
  const double sink = std::exp(static_cast<double>(problem.spec.sink));
  std::vector<double> total(rows, sink);
  for (const ProblemSet& set : problem.sets) {
    const std::vector<double> keys = set.keys.numbers(), values = set.values.numbers();
    std::vector<double>& colsum = answer.colsum.emplace_back(set.spec.count);
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<double> e = exponentials(problem, query, set, keys, r);
      double sum = 0.0;
      for (const double x : e) sum += x;
      for (size_t j = 0; j < e.size(); ++j) {
        colsum[j] += e[j] / (sum + sink);
        for (int64_t d = 0; d < dim; ++d) {
          const double share = e[j] * values[set.source_row(j) * dim + d];
          answer.out[r * dim + d] += share;
          answer.weight[r * dim + d] += std::fabs(share);
        }
      }
      total[r] += sum;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    answer.lse.push_back(std::log(total[r]));
    if (total[r] == 0.0) continue;  // a row without keys: output 0
    for (int64_t d = 0; d < dim; ++d) {
      answer.out[r * dim + d] /= total[r];
      answer.weight[r * dim + d] /= total[r];
    }
  }
  return answer;
}

}  // namespace h2o_prefill::testing
