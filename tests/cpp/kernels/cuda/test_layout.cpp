// layout.h against the emulated instructions.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill {
namespace {

using layout::swizzle;

constexpr int kTile = 16;
constexpr int kWarp = 32;

// A unit of 8 elements in a tile with rows of `units` units.
using Place = int (*)(int row, int unit, int units);

int in_order(int row, int unit, int units) { return row * units + unit; }

struct ProductParams {
  const uint16_t* a;  // [16, dim]
  const uint16_t* b;  // [16, dim]
  float* c;           // [16, 16] = a b^T
  int dim;
  Place stored_at;
  Place looked_for_at;
};

template <DType dtype>
__global__ void product_kernel(const ProductParams params) {
  const int units = params.dim / layout::kUnitElements;
  auto* a_tile = ptx::dynamic_shared<uint16_t>();
  uint16_t* b_tile = a_tile + kTile * params.dim;
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < kTile * units; i += kWarp) {
    const int to = params.stored_at(i / units, i % units, units) * layout::kUnitElements;
    ptx::cp_async_16(a_tile + to, params.a + i * layout::kUnitElements, true);
    ptx::cp_async_16(b_tile + to, params.b + i * layout::kUnitElements, true);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  const auto at = [&](const uint16_t* tile, int row, int unit) {
    return tile + params.looked_for_at(row, unit, units) * layout::kUnitElements;
  };
  float c[2][4] = {};
  uint32_t a[4];
  uint32_t b[4];
  for (int unit = 0; unit < units; unit += 2) {
    ptx::ldmatrix_x4(a, at(a_tile, layout::load_a_row(lane), unit + layout::load_a_unit(lane)));
    ptx::ldmatrix_x4(b, at(b_tile, layout::load_b_row(lane), unit + layout::load_b_unit(lane)));
    ptx::mma_m16n8k16<dtype>(c[0], a, b[0], b[1]);
    ptx::mma_m16n8k16<dtype>(c[1], a, b[2], b[3]);
  }
  for (int i = 0; i < 8; ++i) {
    const int column = layout::accumulator_column(lane, i % 4) + 8 * (i / 4);
    params.c[layout::accumulator_row(lane, i % 4) * kTile + column] = c[i / 4][i % 4];
  }
}

class Swizzle : public ::testing::TestWithParam<int> {  // head_dim
 protected:
  int units() const { return GetParam() / layout::kUnitElements; }

  // Elements that differ from the product.
  template <DType dtype>
  int wrong_products(Place stored_at, Place looked_for_at) const {
    const int dim = GetParam();
    const auto number = [](int i, int factor, int n) { return i * factor % n - n / 2; };
    std::vector<uint16_t> a, b;
    for (int i = 0; i < kTile * dim; ++i) {
      a.push_back(ptx::from_float<dtype>(static_cast<float>(number(i, 37, 23))));
      b.push_back(ptx::from_float<dtype>(static_cast<float>(number(i, 29, 19))));
    }
    std::vector<float> c(kTile * kTile);
    const ProductParams params{a.data(), b.data(), c.data(), dim, stored_at, looked_for_at};
    EXPECT_EQ(
        launch(product_kernel<dtype>, 1, kWarp, 2 * a.size() * sizeof(uint16_t), nullptr, params),
        cudaSuccess);
    int wrong = 0;
    for (int i = 0; i < kTile * kTile; ++i) {
      int sum = 0;
      for (int k = 0; k < dim; ++k) {
        const int row = i / kTile, column = i % kTile;
        sum += number(row * dim + k, 37, 23) * number(column * dim + k, 29, 19);
      }
      wrong += c[i] != static_cast<float>(sum);
    }
    return wrong;
  }
};

TEST_P(Swizzle, GivesEveryUnitItsPlaceInItsRow) {
  for (int row = 0; row < 64; ++row) {
    std::set<int> places;
    for (int unit = 0; unit < units(); ++unit) places.insert(swizzle(row, unit, units()));
    EXPECT_EQ(places.size(), units());
    EXPECT_EQ(*places.begin(), row * units());
    EXPECT_EQ(*places.rbegin(), (row + 1) * units() - 1);
  }
}

TEST_P(Swizzle, ProductsAreRightWithoutBankConflict) {
  cuda_emulation::ldmatrix_conflicts = 0;
  EXPECT_EQ(wrong_products<DType::kFloat16>(swizzle, swizzle), 0);
  EXPECT_EQ(wrong_products<DType::kBFloat16>(swizzle, swizzle), 0);
  EXPECT_EQ(cuda_emulation::ldmatrix_conflicts, 0);
}

TEST_P(Swizzle, IsNeeded) {
  cuda_emulation::ldmatrix_conflicts = 0;
  EXPECT_EQ(wrong_products<DType::kFloat16>(in_order, in_order), 0);
  // All matrices: 4 of a and 4 of b in every 16 columns.
  EXPECT_EQ(cuda_emulation::ldmatrix_conflicts, GetParam() / 16 * 8);
  EXPECT_GT(wrong_products<DType::kFloat16>(swizzle, in_order), 100);
  EXPECT_GT(wrong_products<DType::kFloat16>(in_order, swizzle), 100);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Swizzle, ::testing::Values(64, 96, 128, 256));

}  // namespace
}  // namespace h2o_prefill
