// The emulation of sm_90a's own instructions: correct kernels get their results, and mistakes stop
// the program or give wrong results.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <ostream>
#include <string_view>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layout_sm90.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace h2o_prefill {
namespace {

constexpr int kSeeds = 8;
constexpr int kRounds = 3;
constexpr int kRows = 64;
constexpr int kDim = 128;  // columns of a, and rows and columns of b
constexpr int kSteps = kDim / 16;

// c += a b^T over the rounds, or a b with a in registers.
enum class Operands { kShared, kRegisters };

struct Params {
  const uint16_t* a;  // [rounds, 64, 128] float16
  const uint16_t* b;  // [rounds, 128, 128]
  float* c;           // [64, 128]
  Operands operands;
  std::string_view mistake;
};

struct Shared {
  uint16_t a[kRows * kDim];
  uint16_t b[kDim * kDim];
  ptx::Mbarrier full;
  ptx::Mbarrier empty;
};
constexpr size_t kSharedBytes = sizeof(Shared) + layout_sm90::kSlabGroupBytes;

__device__ void produce(Shared& shared, const Params& params, int thread) {
  constexpr int kUnits = kDim / layout::kUnitElements;
  for (int round = 0; round < kRounds; ++round) {
    ptx::mbarrier_wait(&shared.empty, round % 2 ^ 1);
    const auto copy = [&](uint16_t* slabs, const uint16_t* from, int rows) {
      for (int i = thread; i < rows * kUnits; i += layout_sm90::kWarpgroupThreads) {
        const int to = layout_sm90::slab_unit(i / kUnits, i % kUnits, rows);
        ptx::cp_async_16(slabs + to * layout::kUnitElements,
                         from + (round * rows * kUnits + i) * layout::kUnitElements, true);
      }
    };
    copy(shared.a, params.a, kRows);
    copy(shared.b, params.b, kDim);
    ptx::cp_async_mbarrier_arrive(&shared.full);
  }
}

__device__ void consume(Shared& shared, const Params& params, int thread) {
  const auto has = [&](std::string_view mistake) { return params.mistake == mistake; };
  const auto release = [&] {
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.empty);
  };
  const bool in_registers = params.operands == Operands::kRegisters;
  uint32_t a[kSteps][4];
  const auto fence_operands = [&] {
    for (int k = 0; in_registers && k < kSteps; ++k) ptx::fence_operand(a[k]);
  };
  float c[64] = {};
  float seen = 0.0F;
  for (int round = 0; round < kRounds; ++round) {
    if (!has("no wait for data")) ptx::mbarrier_wait(&shared.full, round % 2);
    if (!has("no proxy fence")) ptx::fence_async_proxy();
    for (int i = 0; in_registers && i < kSteps * 4; ++i) {
      const int row = round * kRows + layout_sm90::accumulator_row(thread, 2 * (i % 2));
      const int column = i / 4 * 16 + i % 4 / 2 * 8 + layout_sm90::accumulator_column(thread, 0);
      const uint16_t* const pair = params.a + row * kDim + column;
      a[i / 4][i % 4] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
    if (!has("no operand fence")) fence_operands();
    if (!has("no fence")) ptx::wgmma_fence();
    const uint32_t at_a = ptx::shared_address(shared.a), at_b = ptx::shared_address(shared.b);
    for (int k = 0; k < kSteps; ++k) {
      if (in_registers) {
        ptx::wgmma_rows_of_b<DType::kFloat16>(
            c, a[k],
            layout_sm90::slab_rows_descriptor(at_b, kDim) + layout_sm90::descriptor_row_step(k));
      } else {
        ptx::wgmma_m64n128k16<DType::kFloat16>(
            c, layout_sm90::slab_descriptor(at_a) + layout_sm90::descriptor_step(k, kRows),
            layout_sm90::slab_descriptor(at_b) + layout_sm90::descriptor_step(k, kDim),
            round + k > 0);
      }
    }
    ptx::wgmma_commit();
    if (has("release before wait")) release();
    if (has("read before wait")) seen += c[5];
    if (has("accumulator changes")) c[5] += 1.0F;
    if (has("operand changes")) a[3][2] ^= 1;
    if (has("no wait")) return;
    ptx::wgmma_wait<0>();
    fence_operands();
    if (!has("release before wait")) release();
  }
  c[5] += seen;
  for (int i = 0; i < 64; ++i) {
    params.c[layout_sm90::accumulator_row(thread, i) * kDim +
             layout_sm90::accumulator_column(thread, i)] = c[i];
  }
}

// The first warpgroup copies, the second one multiplies.
__global__ void product_kernel(const Params params) {
  auto* const memory = ptx::dynamic_shared<unsigned char>();
  const uint32_t gap = -ptx::shared_address(memory) % layout_sm90::kSlabGroupBytes;
  auto& shared = *reinterpret_cast<Shared*>(memory + gap);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.full, 128);
    ptx::mbarrier_init(&shared.empty, 4);
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % layout_sm90::kWarpgroupThreads;
  threadIdx.x < 128 ? produce(shared, params, thread) : consume(shared, params, thread);
}

int element_of_a(int i) { return i * 37 % 23 - 11; }
int element_of_b(int i) { return i * 29 % 19 - 9; }

std::vector<uint16_t> encode(int count, int (*element)(int)) {
  std::vector<uint16_t> elements;
  for (int i = 0; i < count; ++i) {
    elements.push_back(ptx::from_float<DType::kFloat16>(static_cast<float>(element(i))));
  }
  return elements;
}

// Ends the program if a product is wrong, as the emulation does where it notices the mistake
// itself.
void multiply_or_die(Operands operands, std::string_view mistake) {
  const auto a = encode(kRounds * kRows * kDim, element_of_a);
  const auto b = encode(kRounds * kDim * kDim, element_of_b);
  std::vector<float> expected(kRows * kDim);
  for (int i = 0; i < kRows * kDim; ++i) {
    for (int k = 0; k < kRounds * kDim; ++k) {
      const int of_a = (k / kDim * kRows + i / kDim) * kDim + k % kDim;
      const int column = i % kDim, of_b = operands == Operands::kShared
                                              ? (k / kDim * kDim + column) * kDim + k % kDim
                                              : k * kDim + column;
      expected[i] += static_cast<float>(element_of_a(of_a) * element_of_b(of_b));
    }
  }
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> c(expected.size());
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(launch(product_kernel, 1, 256, kSharedBytes, nullptr,
                     Params{a.data(), b.data(), c.data(), operands, mistake}),
              cudaSuccess);
    if (c == expected) continue;
    std::fprintf(stderr, "wrong product\n");
    std::abort();
  }
}

TEST(EmulationSm90, Products) {
  multiply_or_die(Operands::kShared, "");
  multiply_or_die(Operands::kRegisters, "");
}

struct Mistake {
  Operands operands;
  const char* name;
  const char* message;
};

void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

const Mistake kMistakes[] = {
    {Operands::kShared, "no wait for data", "wrong product|has changed"},
    {Operands::kShared, "release before wait",
     "shared memory has changed between a wgmma .*sm90.cpp:[0-9]+. and the wait for it"},
    {Operands::kShared, "read before wait", "wrong product"},
    {Operands::kShared, "accumulator changes", "an accumulator has changed"},
    {Operands::kShared, "no proxy fence", "copied without fence_async_proxy"},
    {Operands::kShared, "no fence", "without wgmma_fence since the last wait"},
    {Operands::kShared, "no wait", "a thread ends before it has waited"},
    {Operands::kRegisters, "no operand fence", "of registers without fence_operand since they"},
    {Operands::kRegisters, "operand changes", "operand in registers has changed between a wgmma"},
};

class MistakeDeathTest : public ::testing::TestWithParam<Mistake> {};

TEST_P(MistakeDeathTest, IsFound) {
  EXPECT_DEATH(multiply_or_die(GetParam().operands, GetParam().name), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(EmulationSm90, MistakeDeathTest, ::testing::ValuesIn(kMistakes));

}  // namespace
}  // namespace h2o_prefill
