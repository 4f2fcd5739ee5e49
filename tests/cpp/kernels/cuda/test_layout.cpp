// layout.h against what the instructions do.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

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

// What ldmatrix puts into the registers, [32, 8], where lanes name these rows and units.
std::vector<uint16_t> load(int (*row)(int), int (*unit)(int), bool transposed) {
  std::vector<uint16_t> tile(kTile * kTile);
  for (int r = 0; r < kTile; ++r) {
    for (int c = 0; c < kTile; ++c) tile[r * kTile + c] = element(r, c);
  }
  std::vector<uint16_t> registers(kWarp * 8);
  const LoadParams params{tile.data(), registers.data(), row, unit, transposed};
  EXPECT_EQ(launch(load_kernel, 1, kWarp, tile.size() * sizeof(uint16_t), nullptr, params),
            cudaSuccess);
  return registers;
}

// Checks the registers of all lanes: register i of a lane holds the element (row, column).
void expect_elements(const std::vector<uint16_t>& registers, int (*row)(int, int),
                     int (*column)(int, int)) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(registers[lane * 8 + i], element(row(lane, i), column(lane, i)));
    }
  }
}

// Of two fragments of B side by side.
int two_b_row(int lane, int i) { return layout::b_row(lane, i % 4); }
int two_b_column(int lane, int i) { return layout::b_column(lane, i % 4) + 8 * (i / 4); }

TEST(Layout, LdmatrixLoadsTheAFragment) {
  expect_elements(load(layout::load_a_row, layout::load_a_unit, false), layout::a_row,
                  layout::a_column);
}

TEST(Layout, LdmatrixLoadsTheAFragmentStoredByColumns) {
  expect_elements(load(layout::load_a_transposed_row, layout::load_a_transposed_unit, true),
                  layout::a_column, layout::a_row);
}

TEST(Layout, LdmatrixLoadsTwoBFragmentsStoredByColumns) {
  expect_elements(load(layout::load_b_row, layout::load_b_unit, false), two_b_column, two_b_row);
}

TEST(Layout, LdmatrixLoadsTwoBFragmentsStoredByRows) {
  expect_elements(load(layout::load_b_transposed_row, layout::load_b_transposed_unit, true),
                  two_b_row, two_b_column);
}

struct MultiplyParams {
  const float* a;  // [16, 16]
  const float* b;  // [16, 8]
  float* c;        // [16, 8]
};

// One mma whose registers are filled by the maps.
template <DType dtype>
__global__ void multiply_kernel(const MultiplyParams params) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t a[4];
  uint32_t b[2];
  float c[4];
  for (int i = 0; i < 8; i += 2) {
    const float* pair = params.a + layout::a_row(lane, i) * 16 + layout::a_column(lane, i);
    a[i / 2] = ptx::pack_pair<dtype>(pair[0], pair[1]);
  }
  for (int i = 0; i < 4; i += 2) {
    const float* first = params.b + layout::b_row(lane, i) * 8 + layout::b_column(lane, i);
    b[i / 2] = ptx::pack_pair<dtype>(first[0], first[8]);
  }
  for (int i = 0; i < 4; ++i) {
    c[i] = params.c[layout::accumulator_row(lane, i) * 8 + layout::accumulator_column(lane, i)];
  }
  ptx::mma_m16n8k16<dtype>(c, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) {
    params.c[layout::accumulator_row(lane, i) * 8 + layout::accumulator_column(lane, i)] = c[i];
  }
}

template <DType dtype>
void expect_product() {
  std::vector<float> a(16 * 16);
  std::vector<float> b(16 * 8);
  std::vector<float> c(16 * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i * 37 % 23) - 11.0F;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i * 29 % 19) - 9.0F;
  for (size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(i) / 4.0F;
  std::vector<float> expected = c;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 16; ++k) {
        expected[row * 8 + column] += a[row * 16 + k] * b[k * 8 + column];
      }
    }
  }
  const MultiplyParams params{a.data(), b.data(), c.data()};
  ASSERT_EQ(launch(multiply_kernel<dtype>, 1, kWarp, 0, nullptr, params), cudaSuccess);
  EXPECT_EQ(c, expected);
}

TEST(Layout, MmaMultipliesWhatTheMapsSay) {
  expect_product<DType::kBFloat16>();
  expect_product<DType::kFloat16>();
}

// Literals from the figures of the PTX ISA for lane 13, whose group is 3 and whose place in it 1.
TEST(Layout, FragmentsAreThoseOfTheIsa) {
  constexpr int kRows[8] = {3, 3, 11, 11, 3, 3, 11, 11};
  constexpr int kColumns[8] = {2, 3, 2, 3, 10, 11, 10, 11};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(layout::a_row(13, i), kRows[i]);
    EXPECT_EQ(layout::a_column(13, i), kColumns[i]);
  }
  constexpr int kRowsOfB[4] = {2, 3, 10, 11};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(layout::b_row(13, i), kRowsOfB[i]);
    EXPECT_EQ(layout::b_column(13, i), 3);
    EXPECT_EQ(layout::accumulator_row(13, i), kRows[i]);
    EXPECT_EQ(layout::accumulator_column(13, i), kColumns[i]);
  }
}

TEST(Layout, TwoAccumulatorsAreAnAFragment) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(layout::a_row(lane, i), layout::accumulator_row(lane, i % 4));
      EXPECT_EQ(layout::a_column(lane, i), layout::accumulator_column(lane, i % 4) + i / 4 * 8);
    }
  }
}

// Ways that 8 units lie in the same group of 4 banks, at worst: 1 without conflict.
template <typename Index>
int conflict_of_8_rows(int first_row, Index index) {
  int uses[8] = {};
  int worst = 0;
  for (int row = first_row; row < first_row + 8; ++row) {
    worst = std::max(worst, ++uses[index(row) % 8]);
  }
  return worst;
}

class Swizzle : public ::testing::TestWithParam<int> {  // head_dim
 protected:
  static constexpr int kRows = 64;
  int units() const { return GetParam() / layout::kUnitElements; }
};

TEST_P(Swizzle, GivesEveryUnitItsPlaceInItsRow) {
  for (int row = 0; row < kRows; ++row) {
    std::set<int> places;
    for (int unit = 0; unit < units(); ++unit) places.insert(swizzle(row, unit, units()));
    EXPECT_EQ(places.size(), units());
    EXPECT_EQ(*places.begin(), row * units());
    EXPECT_EQ(*places.rbegin(), (row + 1) * units() - 1);
  }
}

TEST_P(Swizzle, LdmatrixReads8RowsWithoutBankConflict) {
  for (int unit = 0; unit < units(); ++unit) {
    for (int first = 0; first + 8 <= kRows; ++first) {
      EXPECT_EQ(conflict_of_8_rows(first, [&](int row) { return swizzle(row, unit, units()); }), 1);
    }
  }
}

TEST_P(Swizzle, IsNeeded) {
  EXPECT_GE(conflict_of_8_rows(0, [&](int row) { return row * units(); }), 4);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Swizzle, ::testing::Values(64, 96, 128, 256));

}  // namespace
}  // namespace h2o_prefill
