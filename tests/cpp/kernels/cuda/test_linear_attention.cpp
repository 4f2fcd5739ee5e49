// The kernels of linear attention on the emulation against the recurrence in float64.
#include "kernels/cuda/linear_attention.h"

#include <gtest/gtest.h>

#include "cuda_emulation/scheduler.h"
#include "kernels/cuda/attention.h"

namespace h2o_prefill::testing {
namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16};

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

  double decay(int64_t unit, int64_t t) const {
    if (x.decay == Decay::kNone) return 0.0;
    return decays[x.decay == Decay::kByHead ? unit % x.kv_heads : unit * x.length + t];
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
  std::vector<float> workspace(linear_attention_workspace_floats(p) + 4, NAN);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = reinterpret_cast<float*>((address + 15) / 16 * 16);
  EXPECT_EQ(launch_linear_attention(p, nullptr), cudaSuccess);
  EXPECT_TRUE(out.rows.gaps_untouched());
  result.out = out.numbers();
  return result;
}

// The features of all rows.
std::vector<double> features(const Heads& heads, FeatureMap feature_map) {
  std::vector<double> all = heads.numbers();
  for (double& x : all) {
    if (feature_map == FeatureMap::kRelu) x = std::max(x, 0.0);
    if (feature_map == FeatureMap::kEluPlusOne) x = x > 0 ? x + 1 : std::exp(x);
  }
  return all;
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
  // A term has up to three rounded operands, with room.
  double tolerance(DType dtype, double of_sum) const {
    return std::max(3 * rounding(dtype), 1e-6) * std::sqrt(squares) + of_sum * std::fabs(sum);
  }
};

double of_result(DType dtype) { return std::max(rounding(dtype), 1e-6); }

void check(const Case& x) {
  SCOPED_TRACE(::testing::Message()
               << name_of(x.dtype) << ", " << x.length << " tokens, dims " << x.dim << " and "
               << x.value_dim << ", heads " << x.heads << " of " << x.kv_heads << ", decay "
               << static_cast<int>(x.decay) << ", features " << static_cast<int>(x.feature_map)
               << (x.normalize ? ", normalised" : "") << (x.has_state ? ", a state" : ""));
  const Problem problem(x);
  const Result got = run(problem);
  const int64_t dim = x.dim, value_dim = x.value_dim, group = x.heads / x.kv_heads;
  const auto queries = features(problem.query, x.feature_map);
  const auto keys = features(problem.key, x.feature_map), values = problem.value.numbers();
  // Token by token. A normaliser is one more column of values, all 1.
  const int64_t columns = value_dim + 1;
  for (int64_t unit = 0; unit < x.batch * x.kv_heads; ++unit) {
    std::vector<Sum> state(dim * columns);
    for (int64_t i = 0; x.has_state && i < dim * columns; ++i) {
      const int64_t d = unit * dim + i / columns, v = i % columns;
      if (v < value_dim) state[i].add(problem.state[d * value_dim + v]);
      if (v == value_dim && x.normalize) state[i].add(problem.normalizer[d]);
    }
    for (int64_t t = 0; t < x.length; ++t) {
      const int64_t row = unit * x.length + t;
      const double kept = std::exp(problem.decay(unit, t));
      for (int64_t i = 0; i < dim * columns; ++i) {
        const int64_t v = i % columns;
        state[i].decay(kept);
        state[i].add(keys[row * dim + i / columns] *
                     (v < value_dim ? values[row * value_dim + v] : 1.0));
      }
      // A few rows of every tile, and the first and last ones.
      if (t % 16 != 3 && t > 0 && t + 1 < x.length) continue;
      for (int64_t head = unit * group; head < (unit + 1) * group; ++head) {
        const int64_t query_row = head * x.length + t;
        std::vector<Sum> out(columns);
        for (int64_t i = 0; i < dim * columns; ++i) {
          const double q = queries[query_row * dim + i / columns];
          Sum& sum = out[i % columns];
          sum.sum += q * state[i].sum;
          // Products within a chunk are rounded after their sum over d.
          sum.squares += q * q * (state[i].sum * state[i].sum + state[i].squares * dim);
        }
        const double weight = out.back().sum;
        const double factor = x.normalize ? (weight == 0 ? 0 : 1 / weight) : 0.25;
        for (int64_t v = 0; v < value_dim; ++v) {
          ASSERT_NEAR(got.out[query_row * value_dim + v], out[v].sum * factor,
                      out[v].tolerance(x.dtype, of_result(x.dtype)) * std::fabs(factor) + 1e-6)
              << "row " << query_row << ", column " << v;
        }
      }
    }
    for (int64_t i = 0; i < dim * columns; ++i) {
      const int64_t d = unit * dim + i / columns, v = i % columns;
      if (v == value_dim && !x.normalize) continue;
      ASSERT_NEAR(v < value_dim ? got.state[d * value_dim + v] : got.normalizer[d], state[i].sum,
                  state[i].tolerance(x.dtype, 1e-6) + 1e-6)
          << "state " << d << ", column " << v;
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
}

TEST(LinearAttention, FeaturesNormaliserAndDecays) {
  for (const DType dtype : kDTypes) {
    for (const FeatureMap feature_map :
         {FeatureMap::kIdentity, FeatureMap::kRelu, FeatureMap::kEluPlusOne}) {
      for (const Decay decay : {Decay::kNone, Decay::kByHead, Decay::kByToken}) {
        Case x{.dtype = dtype, .length = 100, .dim = 24, .feature_map = feature_map};
        x.decay = decay;
        // A divisor near 0 has no right digits.
        x.normalize = feature_map != FeatureMap::kIdentity;
        check(x);
        x.normalize = false;
        x.value_dim = 16;
        x.has_state = true;
        check(x);
      }
    }
  }
}

TEST(LinearAttention, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kDTypes) {
    for (const int64_t group : {1, 3, 4}) {
      Case x = full_case(dtype, 130, 16, 32);
      x.heads = 2 * group;
      x.kv_heads = x.batch = 2;
      x.decay = group == 1 ? Decay::kByHead : Decay::kByToken;
      x.transposed = group != 3;
      check(x);
    }
  }
}

// Units for all blocks that are wanted: a block has more than one query head.
TEST(LinearAttention, ManyHeads) {
  Case x = full_case(DType::kBFloat16, 70, 8, 8);
  x.heads = 17 * 8;
  x.kv_heads = 8;
  x.batch = 2;
  check(x);
}

// Around the shortest piece, and several of them.
TEST(LinearAttention, Pieces) {
  for (const DType dtype : kDTypes) {
    for (const int64_t length : {511, 512, 513, 1600}) {
      Case x = full_case(dtype, length, 16, 16);
      x.heads = 2;
      x.has_state = length != 513;
      x.least_decay = -0.2F;
      check(x);
    }
    check({.dtype = dtype, .length = 1100, .dim = 128, .value_dim = 72});
  }
}

TEST(LinearAttention, StrongDecaysAndLargeProducts) {
  for (const DType dtype : kDTypes) {
    for (const float least : {-40.0F, -1e30F, -HUGE_VALF}) {
      Case x = full_case(dtype, 200, 16, 16);
      x.least_decay = least;
      check(x);
    }
    // Products and states of float16 go beyond its range where the results do not.
    Case x = full_case(dtype, 200, 64, 64);
    x.has_state = false;
    x.magnitude = 300;
    check(x);
  }
}

TEST(LinearAttention, AWeightOfZeroGivesZero) {
  for (const DType dtype : kDTypes) {
    Case x{.dtype = dtype, .length = 70, .dim = 16, .value_dim = 16};
    x.feature_map = FeatureMap::kRelu;
    x.normalize = true;
    Problem problem(x);
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t d = 0; d < 16; ++d) problem.key.rows.set(t, d, t < 66 ? -1 : 1);
    }
    const Result result = run(problem);
    for (int64_t i = 0; i < 70 * 16; ++i) ASSERT_EQ(result.out[i] == 0, i < 66 * 16) << i;
  }
}

TEST(LinearAttention, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kDTypes) {
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
  EXPECT_TRUE(has_linear_attention(DType::kFloat16, 128, 8));
  EXPECT_FALSE(has_linear_attention(DType::kFloat32, 64, 64));
  EXPECT_FALSE(has_linear_attention(DType::kBFloat16, 20, 64));
  EXPECT_FALSE(has_linear_attention(DType::kFloat16, 64, 136));
  const Problem problem({.dtype = DType::kFloat16, .length = 5, .dim = 264});
  EXPECT_EQ(launch_linear_attention(problem.params(), nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace h2o_prefill::testing
