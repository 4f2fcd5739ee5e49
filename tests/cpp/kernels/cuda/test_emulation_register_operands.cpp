// The emulation of products whose first operand is in registers and whose second one lies by rows:
// correct kernels get their results, and mistakes show.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layout_sm90.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace h2o_prefill {
namespace {

constexpr int kRows = 64;   // of weights
constexpr int kKeys = 128;  // rows of values

enum class Mistake {
  kNone,
  kLeadingOffset,
  kByColumns,
  kColumnsSwapped,
  kNoFence,
  kChangesFencedOperand,
  kChangesOperand,
  kChangesOperandBehindTheWait,
  kNoWait,
};

struct Params {
  const uint16_t* weights;  // [64, 128] float16
  const uint16_t* values;   // [128, columns]
  float* c;                 // [64, columns]
};

// One warpgroup, a thread's weights in its registers.
template <int kColumns, Mistake kMistake>
__global__ void product_kernel(const Params params) {
  constexpr int kUnits = kColumns / layout::kUnitElements;
  auto* const memory = ptx::dynamic_shared<unsigned char>();
  auto* const slabs = reinterpret_cast<uint16_t*>(memory + -ptx::shared_address(memory) %
                                                               layout_sm90::kSlabGroupBytes);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kKeys * kUnits; i += layout_sm90::kWarpgroupThreads) {
    ptx::cp_async_16(
        slabs + layout_sm90::slab_unit(i / kUnits, i % kUnits, kKeys) * layout::kUnitElements,
        params.values + i * layout::kUnitElements, true);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  ptx::fence_async_proxy();

  uint32_t a[kKeys / 16][4];
  for (int k = 0; k < kKeys / 16; ++k) {
    for (int i = 0; i < 4; ++i) {
      const int block = kMistake == Mistake::kColumnsSwapped ? 1 - i / 2 : i / 2;
      const int row = layout_sm90::accumulator_row(thread, 2 * (i % 2));
      const int column = 16 * k + 8 * block + layout_sm90::accumulator_column(thread, 0);
      const uint16_t* const pair = params.weights + row * kKeys + column;
      a[k][i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
  }
  const uint32_t address = ptx::shared_address(slabs);
  uint64_t descriptor = layout_sm90::slab_rows_descriptor(address, kKeys);
  if (kMistake == Mistake::kLeadingOffset) {
    descriptor = layout_sm90::slab_rows_descriptor(address, kKeys / 2);
  }
  float c[kColumns / 2] = {};
  const auto fence_operands = [&] {
    for (int k = 0; k < kKeys / 16; ++k) ptx::fence_operand(a[k]);
  };
  if (kMistake != Mistake::kNoFence) fence_operands();
  if (kMistake == Mistake::kChangesFencedOperand) a[3][2] ^= 1;
  ptx::wgmma_fence();
  for (int k = 0; k < kKeys / 16; ++k) {
    const uint64_t step = kMistake == Mistake::kByColumns
                              ? layout_sm90::descriptor_step(k % (kColumns / 16), kKeys)
                              : layout_sm90::descriptor_row_step(k);
    ptx::wgmma_rows_of_b<DType::kFloat16>(c, a[k], descriptor + step);
  }
  ptx::wgmma_commit();
  if (kMistake == Mistake::kChangesOperand) a[3][2] ^= 1;
  if (kMistake != Mistake::kNoWait) ptx::wgmma_wait<0>();
  if (kMistake == Mistake::kChangesOperandBehindTheWait) a[3][2] ^= 1;
  fence_operands();
  for (int i = 0; i < kColumns / 2; ++i) {
    params.c[layout_sm90::accumulator_row(thread, i) * kColumns +
             layout_sm90::accumulator_column(thread, i)] = c[i];
  }
}

int weight(int i) { return i * 37 % 23 - 11; }
int value(int i) { return i * 29 % 19 - 9; }

// How many elements of the product are wrong.
template <int kColumns, Mistake kMistake = Mistake::kNone>
int multiply() {
  const auto encode = [](int x) { return ptx::from_float<DType::kFloat16>(static_cast<float>(x)); };
  std::vector<uint16_t> weights(kRows * kKeys), values(kKeys * kColumns);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = encode(weight(static_cast<int>(i)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = encode(value(static_cast<int>(i)));
  std::vector<float> c(kRows * kColumns);
  constexpr size_t kBytes = kKeys * kColumns * sizeof(uint16_t) + layout_sm90::kSlabGroupBytes;
  EXPECT_EQ(launch(product_kernel<kColumns, kMistake>, 1, 128, kBytes, nullptr,
                   Params{weights.data(), values.data(), c.data()}),
            cudaSuccess);
  int wrong = 0;
  for (int i = 0; i < kRows * kColumns; ++i) {
    int expected = 0;
    for (int key = 0; key < kKeys; ++key) {
      expected += weight(i / kColumns * kKeys + key) * value(key * kColumns + i % kColumns);
    }
    wrong += c[i] != static_cast<float>(expected);
  }
  return wrong;
}

TEST(EmulationRegisterOperands, Products) {
  EXPECT_EQ(multiply<64>(), 0);
  EXPECT_EQ(multiply<128>(), 0);
}

TEST(EmulationRegisterOperands, WrongDescriptors) {
  // The offset matters from the second 64 columns on.
  EXPECT_EQ((multiply<64, Mistake::kLeadingOffset>()), 0);
  EXPECT_GT((multiply<128, Mistake::kLeadingOffset>()), kRows * 64 * 9 / 10);
  EXPECT_GT((multiply<64, Mistake::kByColumns>()), kRows * 64 * 9 / 10);
  EXPECT_GT((multiply<128, Mistake::kColumnsSwapped>()), kRows * 128 * 9 / 10);
}

TEST(EmulationRegisterOperandsDeathTest, OperandsWithoutAFence) {
  const char* const message = "wgmma_rows_of_b of registers without fence_operand since they";
  EXPECT_DEATH((multiply<64, Mistake::kNoFence>()), message);
  EXPECT_DEATH((multiply<64, Mistake::kChangesFencedOperand>()), message);
  EXPECT_DEATH((multiply<64, Mistake::kChangesOperandBehindTheWait>()),
               "changed between the wait for its wgmma and fence_operand .*operands.cpp");
}

TEST(EmulationRegisterOperandsDeathTest, OperandsThatChangeUnderWay) {
  EXPECT_DEATH((multiply<64, Mistake::kChangesOperand>()),
               "an operand in registers has changed between a wgmma .*register_operands.cpp");
}

TEST(EmulationRegisterOperandsDeathTest, EndWithProductsUnderWay) {
  EXPECT_DEATH((multiply<64, Mistake::kNoWait>()), "a thread ends before it has waited");
}

}  // namespace
}  // namespace h2o_prefill
