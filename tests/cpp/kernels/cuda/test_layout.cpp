// layout.h against what the instructions do.
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

// A 16x16 tile whose element (row, column) is the number 16 row + column, as bits.
constexpr int kTile = 16;
constexpr uint16_t element(int row, int column) {
  return static_cast<uint16_t>(kTile * row + column);
}

constexpr int kWarp = 32;

struct LoadParams {
  const uint16_t* tile;
  uint16_t* registers;  // [32, 8]
  int (*row)(int lane);
  int (*unit)(int lane);
  bool transposed;
};

__global__ void load_kernel(const LoadParams params) {
  auto* shared = ptx::dynamic_shared<uint16_t>();
  const int lane = static_cast<int>(threadIdx.x);
  ptx::cp_async_16(shared + lane * 8, params.tile + lane * 8, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  const uint16_t* row = shared + params.row(lane) * kTile + params.unit(lane) * 8;
  uint32_t r[4];
  if (params.transposed) {
    ptx::ldmatrix_x4_transposed(r, row);
  } else {
    ptx::ldmatrix_x4(r, row);
  }
  for (int i = 0; i < 8; ++i) {
    params.registers[lane * 8 + i] = static_cast<uint16_t>(r[i / 2] >> (i % 2 * 16));
  }
}

// What ldmatrix puts into register i of a lane, where lanes name these rows and units, is the
// element (element_row, element_column).
void expect_loads(bool transposed, int (*row)(int lane), int (*unit)(int lane),
                  int (*element_row)(int lane, int i), int (*element_column)(int lane, int i)) {
  std::vector<uint16_t> tile(kTile * kTile);
  for (int r = 0; r < kTile; ++r) {
    for (int c = 0; c < kTile; ++c) tile[r * kTile + c] = element(r, c);
  }
  std::vector<uint16_t> registers(kWarp * 8);
  const LoadParams params{tile.data(), registers.data(), row, unit, transposed};
  ASSERT_EQ(launch(load_kernel, 1, kWarp, tile.size() * sizeof(uint16_t), nullptr, params),
            cudaSuccess);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(registers[lane * 8 + i], element(element_row(lane, i), element_column(lane, i)));
    }
  }
}

// Of two fragments of B side by side.
int two_b_row(int lane, int i) { return layout::b_row(lane, i % 4); }
int two_b_column(int lane, int i) { return layout::b_column(lane, i % 4) + 8 * (i / 4); }

TEST(Layout, LdmatrixLoadsTheFragments) {
  expect_loads(false, layout::load_a_row, layout::load_a_unit, layout::a_row, layout::a_column);
  expect_loads(true, layout::load_a_transposed_row, layout::load_a_transposed_unit,
               layout::a_column, layout::a_row);
  // Stored by columns, and by rows.
  expect_loads(false, layout::load_b_row, layout::load_b_unit, two_b_column, two_b_row);
  expect_loads(true, layout::load_b_transposed_row, layout::load_b_transposed_unit, two_b_row,
               two_b_column);
}

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
  for (int unit = 0; unit < units; unit += 2) {
    uint32_t a[4];
    uint32_t b[4];
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
      for (int d = 0; d < dim; ++d) {
        sum += number(i / kTile * dim + d, 37, 23) * number(i % kTile * dim + d, 29, 19);
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
