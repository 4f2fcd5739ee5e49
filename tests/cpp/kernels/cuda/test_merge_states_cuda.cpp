// Fusion of partial results against float64, in every dtype and alignment.
#include "kernels/cuda/merge_states.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/float16.h"

namespace h2o_prefill {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float load(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

void store(void* data, DType dtype, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<uint16_t*>(data)[i] =
        dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_float16(x);
  }
}

// [B, H, T, D] stored as [B, T, H, D] with a gap of `gap` elements after each row.
struct Heads {
  std::vector<float> memory;
  HeadsView view;

  Heads(DType dtype, int64_t dim, int64_t gap)
      : memory(kBatch * kLength * kHeads * (dim + gap) + 4), view{memory.data(),
                                                                  dtype,
                                                                  kBatch,
                                                                  kHeads,
                                                                  kLength,
                                                                  dim,
                                                                  kLength * kHeads * (dim + gap),
                                                                  dim + gap,
                                                                  kHeads * (dim + gap)} {}

  static constexpr int64_t kBatch = 2;
  static constexpr int64_t kHeads = 3;
  static constexpr int64_t kLength = 11;
};

void check(DType dtype, int64_t dim, int64_t gap) {
  SCOPED_TRACE(::testing::Message()
               << "dtype " << static_cast<int>(dtype) << ", head dim " << dim << ", gap " << gap);
  constexpr int64_t kRows = Heads::kBatch * Heads::kHeads * Heads::kLength;
  Heads a(dtype, dim, gap), b(dtype, dim, gap), out(dtype, dim, gap);
  std::vector<float> lse_a(kRows), lse_b(kRows), lse(kRows, kNan);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int64_t row = 0; row < kRows; ++row) {
    lse_a[row] = row % 5 == 1 || row % 5 == 3 ? -kInf : 10 * normal(random);
    lse_b[row] = row % 5 == 2 || row % 5 == 3 ? -kInf : 10 * normal(random);
    if (row % 7 == 0) lse_a[row] += 1e4F;
    const int64_t t = row % Heads::kLength;
    const int64_t h = row / Heads::kLength % Heads::kHeads;
    const int64_t n = row / Heads::kLength / Heads::kHeads;
    for (int64_t d = 0; d < dim; ++d) {
      store(a.view.row(n, h, t), dtype, d, lse_a[row] == -kInf ? kNan : normal(random));
      store(b.view.row(n, h, t), dtype, d, lse_b[row] == -kInf ? kNan : normal(random));
    }
  }
  ASSERT_EQ(launch_merge_states({a.view, b.view, out.view, lse_a.data(), lse_b.data(), lse.data()},
                                nullptr),
            cudaSuccess);

  const double rounding =
      dtype == DType::kFloat32 ? 1e-6 : (dtype == DType::kBFloat16 ? 1.0 / 256 : 1.0 / 2048);
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t t = row % Heads::kLength;
    const int64_t h = row / Heads::kLength % Heads::kHeads;
    const int64_t n = row / Heads::kLength / Heads::kHeads;
    const double highest = std::max(lse_a[row], lse_b[row]);
    const bool empty = highest == -kInf;
    const double weight_a = empty ? 0 : std::exp(lse_a[row] - highest);
    const double weight_b = empty ? 0 : std::exp(lse_b[row] - highest);
    const double total = weight_a + weight_b;
    if (empty) {
      ASSERT_EQ(lse[row], -kInf);
    } else {
      ASSERT_NEAR(lse[row], highest + std::log(total), 1e-6 * std::max(1.0, std::abs(highest)));
    }
    for (int64_t d = 0; d < dim; ++d) {
      double expected = 0;
      if (weight_a > 0) expected += weight_a / total * load(a.view.row(n, h, t), dtype, d);
      if (weight_b > 0) expected += weight_b / total * load(b.view.row(n, h, t), dtype, d);
      // Distances of logits carry the rounding of their float32 values.
      ASSERT_NEAR(load(out.view.row(n, h, t), dtype, d), expected,
                  rounding * std::max(1.0, std::abs(expected)) + 1e-5)
          << "row " << row << ", element " << d;
    }
  }
}

TEST(MergeStatesCuda, AgreesWithFloat64) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t dim : {1, 8, 13, 64, 80, 256, 264}) {
      for (const int64_t gap : {0, 1, 8}) check(dtype, dim, gap);
    }
  }
}

TEST(MergeStatesCuda, NoRows) {
  MergeStatesParams params{};
  params.out.heads = params.out.batch = 1;
  params.out.dim = 8;
  EXPECT_EQ(launch_merge_states(params, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace h2o_prefill
