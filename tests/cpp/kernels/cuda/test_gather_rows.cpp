// Copies of rows by index: every unit that addresses allow, absent rows, strides.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/gather_rows.h"

namespace h2o_prefill {
namespace {

// Rows of row_bytes, whose strides and first byte are multiples of `unit` and no more.
void check(int64_t row_bytes, int64_t unit, int64_t count) {
  SCOPED_TRACE(::testing::Message()
               << "rows of " << row_bytes << " bytes, unit " << unit << ", " << count << " rows");
  constexpr int64_t kBatch = 2;
  constexpr int64_t kHeads = 3;
  constexpr int64_t kLength = 7;
  const int64_t stride_row = row_bytes + unit;
  const int64_t stride_head = kLength * stride_row + 2 * unit;
  const int64_t stride_batch = kHeads * stride_head + unit;
  alignas(16) static char memory[1 << 17];
  ASSERT_LE(unit + kBatch * stride_batch, static_cast<int64_t>(sizeof(memory)));
  char* const from = memory + unit;
  std::mt19937 random(static_cast<unsigned>(row_bytes + count));
  for (char& byte : memory) byte = static_cast<char>(random());
  std::vector<int32_t> indices(kBatch * kHeads * count);
  for (int32_t& index : indices) index = static_cast<int32_t>(random() % (kLength + 2)) - 1;
  std::vector<uint64_t> to((indices.size() * row_bytes + 7) / 8 + 2, 0x5A5A5A5A5A5A5A5A);
  // The first multiple of 16 bytes.
  char* const result = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(to.data()) + 15) & ~15);

  ASSERT_EQ(launch_gather_rows({from, stride_batch, stride_head, stride_row, kLength,
                                indices.data(), result, kBatch, kHeads, count, row_bytes},
                               nullptr),
            cudaSuccess);
  const std::vector<char> zeros(row_bytes);
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t list = static_cast<int64_t>(i) / count;
    const bool present = indices[i] >= 0 && indices[i] < kLength;
    const char* row =
        from + list / kHeads * stride_batch + list % kHeads * stride_head + indices[i] * stride_row;
    ASSERT_EQ(std::memcmp(result + i * row_bytes, present ? row : zeros.data(), row_bytes), 0)
        << "row " << i << ", index " << indices[i];
  }
}

TEST(GatherRows, RowsOfEverySize) {
  for (const int64_t elements : {1, 3, 8, 12, 64, 80, 256, 300}) {
    for (const int64_t element_bytes : {2, 4, 8}) check(elements * element_bytes, element_bytes, 9);
  }
}

TEST(GatherRows, AlignedRows) {
  for (const int64_t row_bytes : {16, 128, 160, 512, 1040}) check(row_bytes, 16, 9);
  // Around the rows of a CTA.
  for (const int64_t count : {0, 1, 7, 8, 9, 65}) check(512, 16, count);
}

}  // namespace
}  // namespace h2o_prefill
