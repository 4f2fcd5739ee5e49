// pack_keys, pack_values, attend_rows, attend_token and packed linear layers of one instruction
// set, H2O_ISA, against float64: their vectors, and where they write. The operators are compared in
// Python, where that runs.
//
// Needs nothing but a compiler, so that it can be built for other processors. Exit status 77: this
// CPU does not have the instruction set.
#include <cstdio>
#include <functional>
#include <sstream>

#include "kernels/attend_run.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/packed_linear_run.h"

#define H2O_STRING_OF(x) #x
#define H2O_STRING(x) H2O_STRING_OF(x)

namespace h2o_prefill {

namespace H2O_ISA {
extern const CpuKernels kCpuKernels;
}

namespace testing {
namespace {

constexpr int kSkipped = 77;

int checks = 0;
int failures = 0;

// Counts a check; prints it if `wrong` says something.
void check(const std::string& name, const std::string& wrong) {
  ++checks;
  if (wrong.empty()) return;
  ++failures;
  std::printf("FAILED %s: %s\n", name.c_str(), wrong.c_str());
}

std::string describe(const ProblemSpec& spec) {
  std::ostringstream text;
  text << spec.name << ", " << name_of(spec.dtype) << " to " << name_of(spec.out_dtype) << ", rows "
       << spec.rows << ", dims " << spec.head_dim << " and " << spec.value_dim << ", keys";
  for (const SetSpec& set : spec.sets) text << ' ' << set.count;
  return text.str();
}

void check_problem(const Problem& problem) {
  const CpuKernels& kernels = H2O_ISA::kCpuKernels;
  check(describe(problem.spec), mistakes(kernels, problem, solve(problem), run(kernels, problem)));
}

float usual_scale(int64_t head_dim) { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }

// A problem of usual size.
ProblemSpec usual(const std::string& name, DType dtype, std::vector<SetSpec> sets) {
  return {name, dtype, dtype, 70, 64, 80, usual_scale(64), std::move(sets)};
}

// Checks one of usual size in every dtype, with a test's changes.
void check_usual(
    const std::string& name, const std::vector<SetSpec>& sets,
    const std::function<void(ProblemSpec&)>& change = [](ProblemSpec&) {}) {
  for (const DType dtype : kDTypes) {
    ProblemSpec spec = usual(name, dtype, sets);
    change(spec);
    check_problem(make_problem(spec));
  }
}

SetSpec causal(int64_t count) { return {count, causal_limits(70, count)}; }
SetSpec late(int64_t count, bool gathered = false) {
  return {count, late_limits(70, count), gathered};
}
SetSpec gathered(int64_t count) { return {count, {}, true}; }

void test_shapes() {
  const std::vector<int64_t> dims = {1, 7, 32, 64, 80, 128};
  for (size_t d = 0; d < dims.size(); ++d) {
    for (const int64_t count : {1, 31, 33, 200}) {
      for (const int64_t rows : {1, 37, 70}) {
        check_usual("shapes", {{count}}, [&](ProblemSpec& spec) {
          spec.rows = rows;
          spec.head_dim = dims[d];
          // Every value dim but the head dim comes up, and every dtype of outputs; every other
          // problem has gaps between rows.
          spec.value_dim = dims[(d + 1 + (count + rows) % 5) % dims.size()];
          spec.scale = usual_scale(dims[d]);
          spec.gap = (count + rows) % 2 ? 3 : 0;
          spec.out_dtype = kDTypes[(d + count + rows) % 3];
        });
      }
    }
  }
}

// Whole tiles and a part of one, for any height of tiles.
void test_row_counts() {
  for (int64_t rows = 1; rows <= 40; ++rows) {
    check_usual("row counts", {{45, causal_limits(rows, 45)}},
                [&](ProblemSpec& spec) { spec.rows = rows; });
  }
}

void test_sets() {
  for (const int64_t count : {20, 33, 70, 300}) {
    check_usual("causal", {causal(count)});
    check_usual("late", {late(count)});
  }
  const SetSpec unwanted{100, {}, false, /*wants_colsum=*/false}, empty{0};
  const SetSpec late_positions = late(33, /*gathered=*/true);
  for (const std::vector<SetSpec>& sets : {std::vector{causal(70), gathered(45), late_positions},
                                           {late_positions, unwanted, causal(70)},
                                           {empty, late_positions},
                                           {gathered(45), empty, causal(70)}}) {
    check_usual("merged", sets, [](ProblemSpec& spec) { spec.gap = 5; });
  }
}

// Logits from -100 to 100. Products are exact, so that no more than the exponential is at stake.
void test_windows() {
  for (const int32_t window : {1, 5, 16, 31, 32, 50, 200}) {
    SetSpec own = causal(300), earlier{130};
    for (int32_t row = 0; row < 70; ++row) {
      own.begins.push_back(std::max(0, own.limits[row] - window));
      earlier.begins.push_back(std::min(130, std::max(0, 130 + row - window)));
    }
    const std::string name = "window " + std::to_string(window);
    check_usual(name, {own});
    check_usual(name, {own, earlier});
    check_usual(name, {earlier, gathered(45)});
  }
}

void test_large_logits() {
  for (const float largest : {100.0F, -100.0F}) {
    check_usual("large logits", {{200}, causal(90)}, [&](ProblemSpec& spec) {
      spec.exact_products = true;
      spec.scale = largest / static_cast<float>(largest_product(make_problem(spec)));
    });
  }
}

// Sinks below the logits, among them and far above them, also for rows without keys; caps that
// nearly all logits reach, that some do, and that none does.
void test_sinks_and_softcaps() {
  const auto check = [](float sink, float softcap, float scale) {
    for (const auto& sets : {std::vector{late(70), gathered(45)}, std::vector{late(70)}}) {
      check_usual("sink " + std::to_string(sink) + ", softcap " + std::to_string(softcap), sets,
                  [&](ProblemSpec& spec) {
                    spec.sink = sink;
                    spec.softcap = softcap;
                    spec.scale = scale;
                  });
    }
  };
  for (const float sink : {-200.0F, 0.0F, 3.0F, 200.0F}) check(sink, 0.0F, usual_scale(64));
  for (const float softcap : {1e-30F, 0.5F, 5.0F, 50.0F, 1e30F}) {
    check(kNegInf, softcap, usual_scale(64));
    check(1.0F, softcap, -0.3F);
    check(kNegInf, softcap, 0.0F);
  }
}

// A NaN in a key reaches every row that sees it, whatever the other keys are, and no other row.
void test_nan_in_a_key() {
  for (const DType dtype : kDTypes) {
    for (const int64_t key : {0, 40, 69}) {
      ProblemSpec spec = usual("NaN", dtype, {causal(70), gathered(30)});
      for (SetSpec& set : spec.sets) set.wants_colsum = false;
      Problem problem = make_problem(spec);
      problem.sets[0].keys.set(key, 5, kNan);
      check_problem(problem);
    }
  }
}

// attend_token: a window of at most `window` keys for each of a head's rows, the last of all keys
// for the last one.
void check_token(ProblemSpec spec, int64_t heads, int64_t count, int64_t window) {
  const CpuKernels& kernels = H2O_ISA::kCpuKernels;
  const int64_t rows = spec.rows, all = heads * rows;
  SetSpec set{count, {}, /*gathered=*/false, /*wants_colsum=*/false};
  for (int64_t r = 0; r < all; ++r) {
    const int64_t limit = std::max<int64_t>(0, count - rows + r % rows + 1);
    set.limits.push_back(static_cast<int32_t>(limit));
    set.begins.push_back(static_cast<int32_t>(std::max<int64_t>(0, limit - window)));
  }
  spec.rows = all, spec.out_dtype = DType::kFloat32, spec.sets = {set};
  const Problem problem = make_problem(spec);
  const ProblemSet& keys = problem.sets[0];
  Outcome result{Rows(DType::kFloat32, all, spec.value_dim), Buffer(all), {Buffer(count)}, true};
  for (int64_t j = 0; j < count; ++j) {
    result.colsum[0].data()[j] = static_cast<float>(colsum_before(j));
  }
  Buffer m(all), l(all), out(all * spec.value_dim);
  Buffer scratch(AttendTokenArgs::scratch_floats(all, spec.head_dim, spec.value_dim, count));
  kernels.attend_token({.query = problem.query.data(),
                        .keys = keys.keys.data(),
                        .values = keys.values.data(),
                        .dtype = spec.dtype,
                        .head_stride = rows * problem.query.stride(),
                        .row_stride = problem.query.stride(),
                        .key_stride = keys.keys.stride(),
                        .value_stride = keys.values.stride(),
                        .heads = heads,
                        .rows = rows,
                        .count = count,
                        .begin = count - rows + 1 - window,
                        .limit = count - rows + 1,
                        .head_dim = spec.head_dim,
                        .value_dim = spec.value_dim,
                        .scale = spec.scale,
                        .softcap = spec.softcap,
                        .m = m.data(),
                        .l = l.data(),
                        .out = out.data(),
                        .scratch = scratch.data()});
  for (int64_t r = 0; r < all; ++r) {
    result.lse.data()[r] = natural_lse(m[r], l[r]);
    for (int64_t d = 0; d < spec.value_dim; ++d) {
      result.out.set(r, d, out[r * spec.value_dim + d] * inverse_denominator(l[r]));
    }
  }
  for (const Buffer* buffer : {&m, &l, &out, &scratch}) result.kept_within &= buffer->kept_within();
  check(describe(spec), mistakes(kernels, problem, solve(problem), result));
}

void test_tokens() {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {1, 12, 64, 80, 128}) {
      for (int64_t rows = 1; rows <= 7; ++rows) {
        ProblemSpec spec = usual("token", dtype, {});
        spec.rows = rows, spec.head_dim = dim, spec.value_dim = rows % 2 ? dim : 72 + dim % 16;
        spec.scale = rows == 3 ? -0.3F : usual_scale(dim), spec.softcap = rows == 4 ? 2.0F : 0.0F;
        spec.gap = rows % 3;
        for (const int64_t count : {1, 5, 64, 200}) check_token(spec, 1 + rows % 3, count, 50);
      }
    }
  }
}

void test_packed_linear() {
  const auto& kernels = *H2O_ISA::kCpuKernels.packed_linear;
  for (const PanelType type : {PanelType::kBFloat16, PanelType::kFloat16, PanelType::kInt8}) {
    for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 130}) {
      for (const int64_t inputs : {2, 36, 644}) {
        const LayerSpec spec{type, tokens, inputs, 1 + (tokens + inputs) % 7, tokens % 2 == 0};
        const std::string name = "panels of type " + std::to_string(static_cast<int>(type)) + ", " +
                                 std::to_string(tokens) + " tokens, " + std::to_string(inputs) +
                                 " inputs";
        check(name, wrong_products(kernels, spec, false));
        if (tokens <= PackedLinearArgs::kFewTokens)
          check(name + ", few", wrong_products(kernels, spec, true));
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace h2o_prefill

int main() {
  using namespace h2o_prefill;
  using namespace h2o_prefill::testing;
  const std::string isa = H2O_STRING(H2O_ISA);
  if (!cpu_has(isa)) {
    std::printf("skipped: this CPU does not have %s\n", isa.c_str());
    return kSkipped;
  }
  check("name",
        H2O_ISA::kCpuKernels.isa == isa ? "" : "it is " + std::string(H2O_ISA::kCpuKernels.isa));
#ifdef __aarch64__
  check("features", cpu_features().starts_with(" ASIMD") ? "" : "got" + cpu_features());
#endif
  test_shapes();
  test_row_counts();
  test_sets();
  test_windows();
  test_large_logits();
  test_sinks_and_softcaps();
  test_nan_in_a_key();
  test_tokens();
  test_packed_linear();
  if (failures) {
    std::printf("%d of %d checks failed\n", failures, checks);
    return 1;
  }
  std::printf("%d checks passed\n", checks);
  return 0;
}
