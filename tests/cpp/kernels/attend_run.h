// Runs the kernels of one instruction set on a problem, and compares their results with the
// answer.
#pragma once

#include <cstdio>

#include "kernels/attend_problem.h"
#include "kernels/cpu/attend_rows.h"

namespace h2o_prefill::testing {

// Exactly as many floats as a kernel says it needs, at first NaN, and a mark after them.
class Buffer {
 public:
  explicit Buffer(int64_t floats) : size_(floats), floats_(floats, std::nanf("")) {
    floats_.push_back(kMark);
  }

  float* data() { return floats_.data(); }
  int64_t size() const { return size_; }
  const float& operator[](int64_t i) const { return floats_[i]; }
  bool kept_within() const { return floats_[size_] == kMark; }

 private:
  static constexpr float kMark = 12345.0F;
  int64_t size_;
  std::vector<float> floats_;
};

inline PackArgs pack_args(const ProblemSet& set, const Rows& rows, float* packed) {
  PackArgs args{};
  args.data = rows.data();
  args.dtype = rows.dtype();
  args.stride_row = rows.stride();
  args.positions = set.positions.empty() ? nullptr : set.positions.data();
  args.count = set.spec.count;
  args.begin = 0;
  args.end = set.spec.count;
  args.dim = rows.dim();
  args.packed = packed;
  return args;
}

// Column sums before a run.
inline double colsum_before(int64_t j) { return 0.5 + static_cast<double>(j % 7) / 8; }

struct Outcome {
  Rows out;
  Buffer lse;
  std::vector<Buffer> colsum;
  bool kept_within;  // no buffer was written after its end, and no gap between rows
};

inline Outcome run(const CpuKernels& kernels, const Problem& problem) {
  const ProblemSpec& spec = problem.spec;
  Outcome result{
      Rows(spec.out_dtype, spec.rows, spec.value_dim, spec.gap), Buffer(spec.rows), {}, true};
  std::vector<Buffer> keys, values;
  int64_t max_count = 0;
  for (const ProblemSet& set : problem.sets) {
    max_count = std::max(max_count, set.spec.count);
    keys.emplace_back(kernels.packed_key_floats(set.spec.count, spec.head_dim, spec.dtype));
    values.emplace_back(kernels.packed_value_floats(set.spec.count, spec.value_dim, spec.dtype));
    kernels.pack_keys(pack_args(set, set.keys, keys.back().data()));
    kernels.pack_values(pack_args(set, set.values, values.back().data()));
    Buffer& colsum = result.colsum.emplace_back(kernels.padded(set.spec.count));
    for (int64_t j = 0; j < colsum.size(); ++j) {
      colsum.data()[j] = static_cast<float>(colsum_before(j));
    }
  }
  std::vector<KeySet> sets;
  for (size_t s = 0; s < problem.sets.size(); ++s) {
    const ProblemSet& set = problem.sets[s];
    sets.push_back({keys[s].data(), values[s].data(), set.spec.count,
                    set.spec.limits.empty() ? nullptr : set.spec.limits.data(),
                    set.spec.wants_colsum ? result.colsum[s].data() : nullptr,
                    set.spec.begins.empty() ? nullptr : set.spec.begins.data()});
  }
  Buffer scratch(kernels.scratch_floats(spec.head_dim, spec.value_dim, max_count));
  AttendRowsArgs args{};
  args.query = problem.query.data();
  args.out = result.out.data();
  args.lse = result.lse.data();
  args.dtype = spec.dtype;
  args.out_dtype = spec.out_dtype;
  args.query_stride = problem.query.stride();
  args.out_stride = result.out.stride();
  args.rows = spec.rows;
  args.head_dim = spec.head_dim;
  args.value_dim = spec.value_dim;
  args.scale = spec.scale;
  args.sink = spec.sink;
  args.softcap = spec.softcap;
  args.sets = sets.data();
  args.num_sets = static_cast<int>(sets.size());
  args.scratch = scratch.data();
  kernels.attend_rows(args);

  result.kept_within =
      scratch.kept_within() && result.lse.kept_within() && result.out.gaps_untouched();
  for (const std::vector<Buffer>* buffers : {&keys, &values, &result.colsum}) {
    for (const Buffer& buffer : *buffers) result.kept_within &= buffer.kept_within();
  }
  return result;
}

constexpr double kTolerance = 1e-5;

// Relative tolerance of logarithms and of sums of probabilities.
inline double relative(double expected) { return kTolerance * std::max(1.0, std::fabs(expected)); }

// Empty if |got[i] - expected(i)| <= tolerance(i) for all i < n; infinities and NaN must agree.
// Otherwise the first entry that is further away, in words.
template <typename Got, typename Expected, typename Tolerance>
std::string difference(const char* what, int64_t n, const Got& got, const Expected& expected,
                       const Tolerance& tolerance) {
  for (int64_t i = 0; i < n; ++i) {
    const double a = got[i], b = expected(i);
    if (a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance(i)) continue;
    char text[160];
    std::snprintf(text, sizeof(text), "%s %d of %d is %.9g, expected %.9g, tolerance %.3g; ", what,
                  static_cast<int>(i), static_cast<int>(n), a, b, tolerance(i));
    return text;
  }
  return "";
}

template <typename Got, typename Expected>
std::string difference(const char* what, int64_t n, const Got& got, const Expected& expected) {
  return difference(what, n, got, expected, [&](int64_t i) { return relative(expected(i)); });
}

// The mistakes of a run, in words; empty if there are none. Values are at most 1. Probabilities
// that are multiplied as bfloat16 are rounded to it. Column sums are added to what was there; those
// that are not wanted stay.
inline std::string mistakes(const CpuKernels& kernels, const Problem& problem, const Answer& answer,
                            const Outcome& run) {
  const ProblemSpec& spec = problem.spec;
  const double of_out = rounding(spec.out_dtype);
  const double of_weight =
      kernels.elements_per_word(spec.dtype) == 2 ? rounding(DType::kBFloat16) : 0.0;
  const std::vector<double> out = run.out.numbers();
  std::string wrong = difference(
      "out", spec.rows * spec.value_dim, out, [&](int64_t i) { return answer.out[i]; },
      [&](int64_t i) {
        return kTolerance + of_out * std::fabs(answer.out[i]) + of_weight * answer.weight[i];
      });
  wrong += difference("lse", spec.rows, run.lse, [&](int64_t r) { return answer.lse[r]; });
  for (size_t s = 0; s < problem.sets.size(); ++s) {
    const SetSpec& set = problem.sets[s].spec;
    wrong += difference("colsum", set.count, run.colsum[s], [&](int64_t j) {
      return colsum_before(j) + (set.wants_colsum ? answer.colsum[s][j] : 0.0);
    });
  }
  return run.kept_within ? wrong : wrong + "written outside of a buffer";
}

}  // namespace h2o_prefill::testing
