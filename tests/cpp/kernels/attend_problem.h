// One call of attend_rows as a test states it, its inputs, and its answer.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/rows.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::testing {

struct SetSpec {
  int64_t count;
  std::vector<int32_t> limits = {};  // empty: every row sees all
  bool gathered = false;             // by a list of positions in no order, with repetitions
  bool wants_colsum = true;
  std::vector<int32_t> begins = {};  // empty: every row sees all up to its limit
};

struct ProblemSpec {
  std::string name;
  DType dtype;
  DType out_dtype;
  int64_t rows;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  std::vector<SetSpec> sets;
  int64_t gap = 0;  // elements between rows, in and out
  // Queries and keys are small multiples of 1/4: their products are exact in float32 in any order.
  bool exact_products = false;
  float sink = kNegInf;  // -inf: none
  float softcap = 0.0F;  // 0: none
};

struct ProblemSet {
  SetSpec spec;
  std::vector<int32_t> positions;  // empty: key j is row j
  Rows keys;
  Rows values;

  int64_t source_row(int64_t j) const { return positions.empty() ? j : positions[j]; }
  int64_t limit(int64_t row) const { return spec.limits.empty() ? spec.count : spec.limits[row]; }
  int64_t begin(int64_t row) const { return spec.begins.empty() ? 0 : spec.begins[row]; }
};

struct Problem {
  ProblemSpec spec;
  Rows query;
  std::vector<ProblemSet> sets;
};

// Values are in [-1, 1]. Logits at a scale of 1 / sqrt(head_dim) are far from uniform.
inline Problem make_problem(const ProblemSpec& spec) {
  Random random(static_cast<uint32_t>(spec.rows * 1000 + spec.head_dim));
  const double step = spec.exact_products ? 0.25 : 0.0;
  Problem problem{spec, Rows(spec.dtype, spec.rows, spec.head_dim, spec.gap), {}};
  random.fill(problem.query, 2.5, step);
  for (const SetSpec& set : spec.sets) {
    const int64_t stored = set.gathered ? 2 * set.count + 3 : set.count;
    std::vector<int32_t> positions;
    while (set.gathered && static_cast<int64_t>(positions.size()) < set.count) {
      positions.push_back(static_cast<int32_t>(random.below(stored)));
    }
    problem.sets.push_back({set, positions, Rows(spec.dtype, stored, spec.head_dim, spec.gap),
                            Rows(spec.dtype, stored, spec.value_dim, 2 * spec.gap)});
    random.fill(problem.sets.back().keys, 2.5, step);
    random.fill(problem.sets.back().values, 1.0);
  }
  return problem;
}

// The largest |query . key| of any row and key.
inline double largest_product(const Problem& problem) {
  double largest = 0.0;
  for (const ProblemSet& set : problem.sets) {
    for (int64_t r = 0; r < problem.query.count(); ++r) {
      for (int64_t j = 0; j < set.keys.count(); ++j) {
        double sum = 0.0;
        for (int64_t d = 0; d < set.keys.dim(); ++d)
          sum += problem.query.get(r, d) * set.keys.get(j, d);
        largest = std::max(largest, std::fabs(sum));
      }
    }
  }
  return largest;
}

// Row r sees keys up to its own, the last row all; the first ones none where there are more rows.
inline std::vector<int32_t> causal_limits(int64_t rows, int64_t count) {
  std::vector<int32_t> limits;
  for (int64_t r = 0; r < rows; ++r) {
    limits.push_back(static_cast<int32_t>(std::max<int64_t>(0, count - rows + r + 1)));
  }
  return limits;
}

// Two thirds of the rows see nothing, then three keys more with each.
inline std::vector<int32_t> late_limits(int64_t rows, int64_t count) {
  std::vector<int32_t> limits;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t limit = std::min(count, 3 * (r - 2 * rows / 3));
    limits.push_back(static_cast<int32_t>(std::max<int64_t>(0, limit)));
  }
  return limits;
}

// The answer to a problem in float64, by the definition: no maximum is subtracted, nothing is
// blocked, packed or merged. A double holds the exponential of any logit that a test makes.
struct Answer {
  std::vector<double> out;                  // [rows, value_dim]
  std::vector<double> weight;               // the same with |value|: the measure of errors
  std::vector<double> lse;                  // [rows]
  std::vector<std::vector<double>> colsum;  // [sets][count]
};

// exp(scale query[row] . key[j]) of all keys up to the row's limit, under the cap; 0 of those
// before its first one.
inline std::vector<double> exponentials(const Problem& problem, const std::vector<double>& query,
                                        const ProblemSet& set, const std::vector<double>& keys,
                                        int64_t row) {
  const int64_t dim = problem.spec.head_dim;
  std::vector<double> result;
  for (int64_t j = 0; j < set.limit(row); ++j) {
    double sum = 0.0;
    if (j < set.begin(row)) {
      result.push_back(0.0);
      continue;
    }
    for (int64_t d = 0; d < dim; ++d) {
      sum += query[row * dim + d] * keys[set.source_row(j) * dim + d];
    }
    const double logit = problem.spec.scale * sum;
    const double cap = problem.spec.softcap;
    result.push_back(std::exp(cap > 0.0 ? cap * std::tanh(logit / cap) : logit));
  }
  return result;
}

// One softmax a row over its visible keys in all sets; column sums by one softmax a row and set.
// The sink is in the denominators of both.
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
      if (sum == 0.0) continue;  // the row sees no key of the set
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
