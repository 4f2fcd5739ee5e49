// Layouts of the warpgroup instructions: addresses, descriptors and accumulators.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "kernels/cuda/layout_sm90.h"

namespace h2o_prefill::layout_sm90 {
namespace {

// What the hardware does to the address of byte `byte` of a row of a slab at address 0.
int swizzled_address(int row, int byte) {
  const int address = row * kSlabRowBytes + byte;
  return address ^ (address >> 7 & 7) << 4;
}

TEST(LayoutSm90, UnitsAreWhereTheHardwareLooksForThem) {
  constexpr int kRows = 128;
  for (int row = 0; row < kRows; ++row) {
    for (int unit = 0; unit < 16; ++unit) {
      const int slab = unit / kSlabUnits * kRows * kSlabRowBytes;
      EXPECT_EQ(slab_unit(row, unit, kRows) * layout::kUnitBytes,
                slab + swizzled_address(row, unit % kSlabUnits * layout::kUnitBytes));
    }
  }
}

TEST(LayoutSm90, EveryUnitHasItsPlace) {
  std::set<int> places;
  for (int row = 0; row < 64; ++row) {
    for (int unit = 0; unit < 16; ++unit) places.insert(slab_unit(row, unit, 64));
  }
  EXPECT_EQ(places.size(), 64 * 16);
  EXPECT_EQ(*places.begin(), 0);
  EXPECT_EQ(*places.rbegin(), 64 * 16 - 1);
}

TEST(LayoutSm90, Descriptors) {
  constexpr uint64_t kDescriptor = make_descriptor(0x12340, 0x160, 0x400, Swizzle::k64Bytes);
  EXPECT_EQ(kDescriptor, 0x8000'0040'0016'1234U);
  // Only 18 bits of an address are meant.
  EXPECT_EQ(make_descriptor(0x40010, 0, 0, Swizzle::kNone), 1U);
  EXPECT_EQ(slab_descriptor(0x8400), 0x4000'0040'0001'0840U);
}

TEST(LayoutSm90, StepsAreSixteenColumns) {
  for (const int rows : {64, 128}) {
    for (int step = 0; step < 8; ++step) {
      const int slab = step / 4 * rows * kSlabRowBytes;
      EXPECT_EQ(descriptor_step(step, rows) * 16, slab + step % 4 * 32);
    }
  }
  // To the largest address of a block's shared memory nothing is carried out of the field.
  EXPECT_LT(227 * 1024 >> 4, 1 << 14);
}

// Element (key, column) of a product's 16 keys lies where the hardware looks for it: in units of 16
// bytes column / 8 % 8, then by leading offsets; rows of 128 bytes, groups of 8 by strides.
TEST(LayoutSm90, RowsOfValues) {
  for (const int rows : {64, 128}) {
    const uint64_t descriptor = slab_rows_descriptor(0x8400, rows);
    EXPECT_EQ(descriptor >> 62, 1U);
    const int leading = static_cast<int>(descriptor >> 16 & 0x3FFF) * 16;
    const int stride = static_cast<int>(descriptor >> 32 & 0x3FFF) * 16;
    for (int key = 0; key < rows; ++key) {
      const int begin =
          static_cast<int>((descriptor + descriptor_row_step(key / 16)) & 0x3FFF) * 16;
      for (int unit = 0; unit < 16; ++unit) {
        int address = begin + key % 16 / 8 * stride + key % 8 * kSlabRowBytes;
        address += unit / 8 * leading + unit % 8 * layout::kUnitBytes;
        address ^= (address >> 7 & 7) << 4;
        EXPECT_EQ(address - 0x8400, slab_unit(key, unit, rows) * layout::kUnitBytes);
      }
    }
  }
}

TEST(LayoutSm90, EveryElementHasItsRegister) {
  std::set<std::pair<int, int>> elements;
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    for (int i = 0; i < 64; ++i) {
      elements.emplace(accumulator_row(thread, i), accumulator_column(thread, i));
    }
  }
  EXPECT_EQ(elements.size(), 64 * 128);
  EXPECT_EQ(*elements.rbegin(), std::make_pair(63, 127));
}

}  // namespace
}  // namespace h2o_prefill::layout_sm90
