// The kernels of linear attention on the emulation against the recurrence in float64.
#include "kernels/cuda/linear_attention.h"

#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attention.h"

namespace h2o_prefill::testing {
namespace {

enum class Decay { kNone, kByHead, kByToken };

struct Case {
  DType dtype;
  int64_t length;
  int64_t dim = 64;
  int64_t value_dim = 64;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t batch = 1;
  FeatureMap feature_map = FeatureMap::kEluPlusOne;
  bool normalize = false;
  Decay decay = Decay::kNone;
  bool has_state = false;
  bool transposed = false;
  bool reversed = false;
  float least_decay = -3.0F;
  double magnitude = 1.0;  // of the queries, keys and values
};

// With all that there is: a normaliser, decays of each token and a state to begin with.
Case full_case(DType dtype, int64_t length, int64_t dim, int64_t value_dim) {
  return {.dtype = dtype,
          .length = length,
          .dim = dim,
          .value_dim = value_dim,
          .normalize = true,
          .decay = Decay::kByToken,
          .has_state = true};
}

struct Problem {
  explicit Problem(const Case& x)
      : x(x),
        query(x.dtype, x.batch, x.heads, x.length, x.dim, x.transposed, x.transposed ? 8 : 0),
        key(x.dtype, x.batch, x.kv_heads, x.length, x.dim, x.transposed),
        value(x.dtype, x.batch, x.kv_heads, x.length, x.value_dim, x.transposed,
              x.transposed ? 16 : 0) {
    Random random(static_cast<uint32_t>(x.length * 1000 + x.dim + x.value_dim));
    for (Heads* heads : {&query, &key, &value}) random.fill(heads->rows, x.magnitude);
    const int64_t units = x.batch * x.kv_heads;
    if (x.decay != Decay::kNone) {
      decays.resize(x.decay == Decay::kByHead ? x.kv_heads : units * x.length);
      for (float& g : decays) g = x.least_decay * std::pow(random.uniform(0, 1), 8);
    }
    if (x.has_state) {
      state.resize(units * x.dim * x.value_dim);
      normalizer.resize(units * x.dim);
      for (float& s : state) s = random.uniform(-9, 9);
      for (float& z : normalizer) z = random.uniform(1, 9);
    }
  }

  float decay(int64_t b, int64_t h, int64_t t) const {
    if (x.decay == Decay::kNone) return 0.0F;
    return x.decay == Decay::kByHead ? decays[h] : decays[(b * x.kv_heads + h) * x.length + t];
  }

  LinearAttentionParams params() const {
    LinearAttentionParams p{};
    p.query = query.view();
    p.key = key.view();
    p.value = value.view();
    if (x.decay != Decay::kNone) {
      const bool by_head = x.decay == Decay::kByHead;
      p.log_decay = decays.data();
      p.decay_stride_batch = by_head ? 0 : x.kv_heads * x.length;
      p.decay_stride_head = by_head ? 1 : x.length;
      p.decay_stride_row = by_head ? 0 : 1;
    }
    if (x.has_state) {
      p.state = state.data();
      if (x.normalize) p.normalizer = normalizer.data();
    }
    p.feature_map = x.feature_map;
    p.normalize = x.normalize;
    p.scale = 0.25F;
    return p;
  }

  Case x;
  Heads query;
  Heads key;
  Heads value;
  std::vector<float> decays;
  std::vector<float> state;
  std::vector<float> normalizer;
};

struct Result {
  std::vector<double> out;  // [B, Hq, T, Dv]
  std::vector<float> state;
  std::vector<float> normalizer;
};

Result run(const Problem& problem) {
  const Case& x = problem.x;
  Heads out(x.dtype, x.batch, x.heads, x.length, x.value_dim, x.transposed, 8);
  const int64_t units = x.batch * x.kv_heads;
  Result result;
  result.state.assign(units * x.dim * x.value_dim, NAN);
  result.normalizer.assign(x.normalize ? units * x.dim : 0, NAN);
  LinearAttentionParams p = problem.params();
  p.out = out.view();
  p.last_state = result.state.data();
  p.last_normalizer = x.normalize ? result.normalizer.data() : nullptr;
  if (x.reversed) p = p.reversed();
  std::vector<float> workspace(linear_attention_workspace_floats(p) + 4, NAN);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = reinterpret_cast<float*>((address + 15) / 16 * 16);
  EXPECT_EQ(launch_linear_attention(p, nullptr), cudaSuccess);
  EXPECT_TRUE(out.rows.gaps_untouched());
  for (int64_t b = 0; b < x.batch; ++b) {
    for (int64_t h = 0; h < x.heads; ++h) {
      for (int64_t t = 0; t < x.length; ++t) {
        for (int64_t d = 0; d < x.value_dim; ++d) {
          result.out.push_back(out.rows.get(out.row(b, h, t), d));
        }
      }
    }
  }
  return result;
}

double feature(FeatureMap feature_map, double x) {
  if (feature_map == FeatureMap::kIdentity) return x;
  if (feature_map == FeatureMap::kRelu) return std::max(x, 0.0);
  return x > 0 ? x + 1 : std::exp(x);
}

struct Sum {
  double sum = 0.0;
  double squares = 0.0;  // of what was added: roundings of the terms are independent

  void add(double x) {
    sum += x;
    squares += x * x;
  }
  void decay(double by) {
    sum *= by;
    squares *= by * by;
  }
};

// The relative rounding of an operand, and how many of them a term has, with room.
double term_rounding(DType dtype) {
  if (dtype == DType::kFloat32) return 1e-6;
  return 3 * (dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11);
}
double result_rounding(DType dtype) {
  if (dtype == DType::kFloat32) return 1e-6;
  return dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

void expect_near(double got, double expected, double tolerance, const char* what) {
  ASSERT_LE(std::fabs(got - expected), tolerance + 1e-6)
      << what << ": " << got << ", expected " << expected;
}

void check(const Case& x) {
  SCOPED_TRACE(::testing::Message()
               << name_of(x.dtype) << ", " << x.length << " tokens, dims " << x.dim << " and "
               << x.value_dim << ", heads " << x.heads << " of " << x.kv_heads << ", decay "
               << static_cast<int>(x.decay) << ", features " << static_cast<int>(x.feature_map)
               << (x.normalize ? ", normalised" : "") << (x.has_state ? ", a state" : ""));
  const Problem problem(x);
  const Result got = run(problem);
  const double of_term = term_rounding(x.dtype), of_result = result_rounding(x.dtype);
  const int64_t group = x.heads / x.kv_heads;
  const auto numbers = [](const Heads& heads) { return heads.rows.numbers(); };
  const auto queries = numbers(problem.query), keys = numbers(problem.key),
             values = numbers(problem.value);
  for (int64_t b = 0; b < x.batch; ++b) {
    for (int64_t h = 0; h < x.kv_heads; ++h) {
      const int64_t unit = b * x.kv_heads + h;
      std::vector<Sum> state(x.dim * x.value_dim), normalizer(x.dim);
      for (int64_t d = 0; x.has_state && d < x.dim; ++d) {
        if (x.normalize) normalizer[d].add(problem.normalizer[unit * x.dim + d]);
        for (int64_t v = 0; v < x.value_dim; ++v) {
          state[d * x.value_dim + v].add(problem.state[(unit * x.dim + d) * x.value_dim + v]);
        }
      }
      for (int64_t step = 0; step < x.length; ++step) {
        const int64_t t = x.reversed ? x.length - 1 - step : step;
        const double kept = std::exp(static_cast<double>(problem.decay(b, h, t)));
        const int64_t key_row = problem.key.row(b, h, t) * x.dim;
        const int64_t value_row = problem.value.row(b, h, t) * x.value_dim;
        for (int64_t d = 0; d < x.dim; ++d) {
          const double k = feature(x.feature_map, keys[key_row + d]);
          normalizer[d].decay(kept);
          normalizer[d].add(k);
          for (int64_t v = 0; v < x.value_dim; ++v) {
            state[d * x.value_dim + v].decay(kept);
            state[d * x.value_dim + v].add(k * values[value_row + v]);
          }
        }
        // A few rows of every tile, and the first and last ones.
        if (step % 16 != 3 && step > 0 && step + 1 < x.length) continue;
        for (int64_t head = h * group; head < (h + 1) * group; ++head) {
          const int64_t query_row = problem.query.row(b, head, t) * x.dim;
          double weight = 0.0;
          std::vector<Sum> out(x.value_dim);
          for (int64_t d = 0; d < x.dim; ++d) {
            const double q = feature(x.feature_map, queries[query_row + d]);
            weight += q * normalizer[d].sum;
            for (int64_t v = 0; v < x.value_dim; ++v) {
              const Sum& s = state[d * x.value_dim + v];
              out[v].sum += q * s.sum;
              // Products within a chunk are rounded after their sum over d.
              out[v].squares += q * q * (s.sum * s.sum + s.squares * x.dim);
            }
          }
          const double factor = x.normalize ? (weight == 0 ? 0 : 1 / weight) : 0.25;
          for (int64_t v = 0; v < x.value_dim; ++v) {
            const double expected = out[v].sum * factor;
            const double spread = std::sqrt(out[v].squares) * std::fabs(factor);
            expect_near(got.out[((b * x.heads + head) * x.length + t) * x.value_dim + v], expected,
                        of_term * spread + of_result * std::fabs(expected), "output");
            if (::testing::Test::HasFatalFailure()) {
              ADD_FAILURE() << "row " << t << ", head " << head << ", column " << v;
              return;
            }
          }
        }
      }
      for (size_t i = 0; i < state.size(); ++i) {
        expect_near(got.state[unit * state.size() + i], state[i].sum,
                    of_term * std::sqrt(state[i].squares) + 1e-6 * std::fabs(state[i].sum),
                    "state");
      }
      for (int64_t d = 0; x.normalize && d < x.dim; ++d) {
        expect_near(got.normalizer[unit * x.dim + d], normalizer[d].sum,
                    of_term * std::sqrt(normalizer[d].squares) + 1e-6 * normalizer[d].sum,
                    "normaliser");
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Around the chunk.
TEST(LinearAttention, AwkwardLengths) {
  for (const DType dtype : kDTypes) {
    for (const int64_t length : {1, 31, 32, 33, 63, 64, 65, 129}) {
      check(full_case(dtype, length, 40, 24));
      check({.dtype = dtype, .length = length, .dim = 8, .value_dim = 72});
    }
  }
}

TEST(LinearAttention, Dims) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {8, 40, 64, 96, 128}) {
      for (const int64_t value_dim : {dim, int64_t{136} - dim}) {
        check(full_case(dtype, 150, dim, value_dim));
      }
    }
  }
  for (const auto& [dim, value_dim] : {std::pair<int64_t, int64_t>{1, 5}, {33, 1}, {192, 200}}) {
    check({.dtype = DType::kFloat32,
           .length = 70,
           .dim = dim,
           .value_dim = value_dim,
           .normalize = true,
           .decay = Decay::kByToken});
  }
}

TEST(LinearAttention, FeaturesNormaliserAndDecays) {
  for (const DType dtype : kDTypes) {
    for (const FeatureMap feature_map :
         {FeatureMap::kIdentity, FeatureMap::kRelu, FeatureMap::kEluPlusOne}) {
      for (const Decay decay : {Decay::kNone, Decay::kByHead, Decay::kByToken}) {
        // A divisor near 0 has no right digits.
        const bool normalize = feature_map != FeatureMap::kIdentity;
        check({.dtype = dtype,
               .length = 100,
               .dim = 24,
               .feature_map = feature_map,
               .normalize = normalize,
               .decay = decay});
        check({.dtype = dtype,
               .length = 100,
               .dim = 64,
               .value_dim = 16,
               .feature_map = feature_map,
               .decay = decay,
               .has_state = true});
      }
    }
  }
}

TEST(LinearAttention, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      check({.dtype = dtype,
             .length = 130,
             .dim = 16,
             .value_dim = 32,
             .heads = 2 * group,
             .kv_heads = 2,
             .batch = 2,
             .normalize = true,
             .decay = group == 1 ? Decay::kByHead : Decay::kByToken,
             .has_state = true,
             .transposed = group != 3});
    }
  }
}

// Units for all blocks that are wanted: a block has more than one query head.
TEST(LinearAttention, ManyHeads) {
  check({.dtype = DType::kBFloat16,
         .length = 70,
         .dim = 8,
         .value_dim = 8,
         .heads = 17 * 8,
         .kv_heads = 8,
         .batch = 2,
         .normalize = true,
         .decay = Decay::kByToken});
  check({.dtype = DType::kFloat32,
         .length = 70,
         .dim = 8,
         .value_dim = 200,
         .heads = 3 * 19,
         .kv_heads = 19,
         .normalize = true,
         .decay = Decay::kByToken});
}

// Around the shortest piece, and several of them.
TEST(LinearAttention, Pieces) {
  for (const DType dtype : kLongCaseDTypes) {
    for (const int64_t length : {511, 512, 513, 1600}) {
      check({.dtype = dtype,
             .length = length,
             .dim = 16,
             .value_dim = 16,
             .heads = 2,
             .kv_heads = 1,
             .normalize = true,
             .decay = Decay::kByToken,
             .has_state = length != 513,
             .least_decay = -0.2F});
    }
    check({.dtype = dtype, .length = 1100, .dim = 128, .value_dim = 72});
  }
}

TEST(LinearAttention, FromTheLastTokenToTheFirst) {
  for (const DType dtype : kDTypes) {
    for (const int64_t length : {70, 700}) {
      Case x = full_case(dtype, length, 16, 16);
      x.transposed = true;
      x.reversed = true;
      check(x);
    }
  }
}

TEST(LinearAttention, StrongDecays) {
  for (const DType dtype : kDTypes) {
    for (const float least : {-40.0F, -1e30F, -HUGE_VALF}) {
      Case x = full_case(dtype, 200, 16, 16);
      x.least_decay = least;
      check(x);
    }
  }
}

// Products and states of float16 go beyond its range where the results do not.
TEST(LinearAttention, LargeProducts) {
  for (const DType dtype : kDTypes) {
    check({.dtype = dtype,
           .length = 200,
           .dim = 64,
           .value_dim = 64,
           .normalize = true,
           .decay = Decay::kByToken,
           .magnitude = 300});
  }
}

TEST(LinearAttention, AWeightOfZeroGivesZero) {
  for (const DType dtype : kDTypes) {
    Problem problem({.dtype = dtype,
                     .length = 70,
                     .dim = 16,
                     .value_dim = 16,
                     .feature_map = FeatureMap::kRelu,
                     .normalize = true});
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t d = 0; d < 16; ++d) problem.key.rows.set(t, d, t < 66 ? -1 : 1);
    }
    const Result result = run(problem);
    for (int64_t i = 0; i < 70 * 16; ++i) ASSERT_EQ(result.out[i] == 0, i < 66 * 16) << i;
  }
}

TEST(LinearAttention, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kLongCaseDTypes) {
    Case x = full_case(dtype, 600, 24, 64);
    x.heads = 2;
    const Problem problem(x);
    cuda_emulation::set_seed(0);
    const Result first = run(problem);
    for (const uint64_t seed : {1, 2}) {
      cuda_emulation::set_seed(seed);
      const Result other = run(problem);
      EXPECT_EQ(first.out, other.out);
      EXPECT_EQ(first.state, other.state);
      EXPECT_EQ(first.normalizer, other.normalizer);
    }
  }
}

TEST(LinearAttention, NothingToDo) {
  for (const DType dtype : kDTypes) run(Problem({.dtype = dtype, .length = 0}));
}

TEST(LinearAttention, DimsThatHaveNoKernel) {
  EXPECT_TRUE(has_linear_attention(DType::kFloat32, 192, 1000));
  EXPECT_FALSE(has_linear_attention(DType::kFloat32, 193, 1));
  EXPECT_FALSE(has_linear_attention(DType::kBFloat16, 20, 64));
  EXPECT_FALSE(has_linear_attention(DType::kFloat16, 64, 136));
  const Problem problem({.dtype = DType::kFloat16, .length = 5, .dim = 264});
  EXPECT_EQ(launch_linear_attention(problem.params(), nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace h2o_prefill::testing
