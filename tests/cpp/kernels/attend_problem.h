// One call of attend_rows as a test states it, its inputs, and its answer.
#pragma once

#include <numeric>
#include <string>

#include "kernels/masked_softmax.h"
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

// The answer to a problem in float64.
struct Answer {
  std::vector<double> out;                  // [rows, value_dim]
  std::vector<double> weight;               // the same with |value|: the measure of errors
  std::vector<double> lse;                  // [rows]
  std::vector<std::vector<double>> colsum;  // [sets][count]
};

// One softmax a row over its visible keys in all sets; column sums by one softmax a row and set.
// The sink is in the denominators of both.
inline Answer solve(const Problem& problem) {
  const ProblemSpec& spec = problem.spec;
  const int64_t dim = spec.head_dim, value_dim = spec.value_dim;
  const std::vector<double> query = problem.query.numbers();
  std::vector<std::vector<double>> keys, values;
  Answer answer;
  for (const ProblemSet& set : problem.sets) {
    keys.push_back(set.keys.numbers());
    values.push_back(set.values.numbers());
    answer.colsum.emplace_back(set.spec.count);
  }
  for (int64_t r = 0; r < spec.rows; ++r) {
    std::vector<double> logits;
    std::vector<const double*> visible;  // their values
    for (size_t s = 0; s < problem.sets.size(); ++s) {
      const ProblemSet& set = problem.sets[s];
      std::vector<double> of_set;
      for (int64_t j = set.begin(r); j < set.limit(r); ++j) {
        const double* const key = &keys[s][set.source_row(j) * dim];
        const double product = std::inner_product(key, key + dim, &query[r * dim], 0.0);
        of_set.push_back(capped(spec.scale * product, spec.softcap));
        visible.push_back(&values[s][set.source_row(j) * value_dim]);
      }
      const Softmax row = softmax(of_set, spec.sink);
      for (size_t j = 0; j < of_set.size(); ++j) {
        answer.colsum[s][set.begin(r) + j] += row.probabilities[j];
      }
      logits.insert(logits.end(), of_set.begin(), of_set.end());
    }
    const Softmax row = softmax(logits, spec.sink);
    answer.lse.push_back(row.lse);
    for (int64_t d = 0; d < value_dim; ++d) {
      double sum = 0.0, weight = 0.0;
      for (size_t j = 0; j < visible.size(); ++j) {
        sum += row.probabilities[j] * visible[j][d];
        weight += row.probabilities[j] * std::fabs(visible[j][d]);
      }
      answer.out.push_back(sum);
      answer.weight.push_back(weight);
    }
  }
  return answer;
}

}  // namespace h2o_prefill::testing
