// The emulation of what sm_90a adds: correct kernels get their results, and mistakes show.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layout_sm90.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace h2o_prefill {
namespace {

using layout_sm90::Swizzle;

constexpr int kSeeds = 8;
constexpr int kRowsA = 64;
constexpr int kRowsB = 128;
constexpr int kDim = 64;
constexpr int kRounds = 3;

enum class Mistake {
  kNone,
  kDoesNotWaitForData,
  kWaitsForOtherPhase,
  kSwizzle64,
  kSwizzle32,
  kNoSwizzle,
  kNotAligned,
  kReadsBeforeWait,
  kReadsGroupUnderWay,
  kTouchesAccumulator,
  kNoProxyFence,
  kNoFence,
  kReleasesBeforeWait,
  kOneWarpReleases,
  kDoesNotWaitForSpace,
  kEndsUnderWay,
  kBarrierNotInitialised,
  kThreeWarps,
};

struct Params {
  const uint16_t* a;  // [rounds, 64, 64] float16
  const uint16_t* b;  // [rounds, 128, 64]
  float* c;           // [64, 128], the sum over the rounds of a b^T
};

struct Shared {
  uint16_t a[kRowsA * kDim];
  uint16_t b[kRowsB * kDim];
  ptx::Mbarrier full;
  ptx::Mbarrier empty;
};
constexpr size_t kSharedBytes = sizeof(Shared) + layout_sm90::kSlabGroupBytes;

template <Mistake kMistake>
__device__ void produce(Shared& shared, const Params& params, int thread) {
  constexpr int kUnits = kDim / layout::kUnitElements;
  for (int round = 0; round < kRounds; ++round) {
    if (kMistake != Mistake::kDoesNotWaitForSpace) {
      ptx::mbarrier_wait(&shared.empty, round % 2 ^ 1);
    }
    const auto copy = [&](uint16_t* slab, const uint16_t* from, int rows) {
      for (int i = thread; i < rows * kUnits; i += layout_sm90::kWarpgroupThreads) {
        const int to = layout_sm90::slab_unit(i / kUnits, i % kUnits, rows);
        ptx::cp_async_16(slab + to * layout::kUnitElements,
                         from + (round * rows * kUnits + i) * layout::kUnitElements, true);
      }
    };
    copy(shared.a, params.a, kRowsA);
    copy(shared.b, params.b, kRowsB);
    ptx::cp_async_mbarrier_arrive(&shared.full);
  }
}

template <Mistake kMistake>
__device__ void consume(Shared& shared, const Params& params, int thread) {
  const auto descriptor = [](const void* slab) {
    const uint32_t address = ptx::shared_address(slab);
    switch (kMistake) {
      case Mistake::kSwizzle64:
        return layout_sm90::make_descriptor(address, 16, 1024, Swizzle::k64Bytes);
      case Mistake::kSwizzle32:
        return layout_sm90::make_descriptor(address, 16, 1024, Swizzle::k32Bytes);
      case Mistake::kNoSwizzle:
        return layout_sm90::make_descriptor(address, 16, 1024, Swizzle::kNone);
      default:
        return layout_sm90::slab_descriptor(address);
    }
  };
  if (kMistake == Mistake::kThreeWarps && thread < 32) return;
  const bool one_warp = kMistake == Mistake::kOneWarpReleases;
  const auto release = [&] {
    __syncwarp();
    if (thread % 32 == 0 && (!one_warp || thread == 0)) ptx::mbarrier_arrive(&shared.empty);
  };
  float c[64];
  float seen = 0.0F;
  for (int round = 0; round < kRounds; ++round) {
    if (kMistake != Mistake::kDoesNotWaitForData) {
      const bool other = kMistake == Mistake::kWaitsForOtherPhase;
      ptx::mbarrier_wait(&shared.full, round % 2 ^ static_cast<int>(other));
    }
    if (kMistake != Mistake::kNoProxyFence) ptx::fence_async_proxy();
    if (kMistake != Mistake::kNoFence) ptx::wgmma_fence();
    for (int k = 0; k < kDim / 16; ++k) {
      ptx::wgmma_m64n128k16<DType::kFloat16>(
          c, descriptor(shared.a) + layout_sm90::descriptor_step(k, kRowsA),
          descriptor(shared.b) + layout_sm90::descriptor_step(k, kRowsB), round + k > 0);
    }
    ptx::wgmma_commit();
    if (kMistake == Mistake::kReleasesBeforeWait) release();
    if (kMistake == Mistake::kReadsBeforeWait) seen += c[5];
    if (kMistake == Mistake::kTouchesAccumulator) c[5] += 1.0F;
    if (kMistake == Mistake::kEndsUnderWay) return;
    if (kMistake == Mistake::kReadsGroupUnderWay) {
      ptx::wgmma_wait<1>();
      seen += c[5];
    }
    ptx::wgmma_wait<0>();
    if (kMistake != Mistake::kReleasesBeforeWait) release();
  }
  c[5] += seen;
  for (int i = 0; i < 64; ++i) {
    params.c[layout_sm90::accumulator_row(thread, i) * kRowsB +
             layout_sm90::accumulator_column(thread, i)] = c[i];
  }
}

// The first warpgroup copies, the second one multiplies.
template <Mistake kMistake>
__global__ void product_kernel(const Params params) {
  auto* const memory = ptx::dynamic_shared<unsigned char>();
  const uint32_t gap = kMistake == Mistake::kNotAligned
                           ? 0
                           : -ptx::shared_address(memory) % layout_sm90::kSlabGroupBytes;
  auto& shared = *reinterpret_cast<Shared*>(memory + gap);
  if (threadIdx.x == 0) {
    if (kMistake != Mistake::kBarrierNotInitialised) ptx::mbarrier_init(&shared.full, 128);
    ptx::mbarrier_init(&shared.empty, kMistake == Mistake::kOneWarpReleases ? 1 : 4);
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % layout_sm90::kWarpgroupThreads;
  if (threadIdx.x < layout_sm90::kWarpgroupThreads) {
    produce<kMistake>(shared, params, thread);
  } else {
    consume<kMistake>(shared, params, thread);
  }
}

int element_of_a(int i) { return i * 37 % 23 - 11; }
int element_of_b(int i) { return i * 29 % 19 - 9; }

struct Wrong {
  int elements = 0;  // of all seeds
  int nans = 0;
};

template <Mistake kMistake>
Wrong multiply() {
  std::vector<uint16_t> a(kRounds * kRowsA * kDim);
  std::vector<uint16_t> b(kRounds * kRowsB * kDim);
  const auto encode = [](int x) { return ptx::from_float<DType::kFloat16>(static_cast<float>(x)); };
  for (size_t i = 0; i < a.size(); ++i) a[i] = encode(element_of_a(static_cast<int>(i)));
  for (size_t i = 0; i < b.size(); ++i) b[i] = encode(element_of_b(static_cast<int>(i)));
  std::vector<float> expected(kRowsA * kRowsB);
  for (int i = 0; i < kRowsA * kRowsB; ++i) {
    for (int d = 0; d < kRounds * kDim; ++d) {
      const int round = d / kDim;
      const int of_a = (round * kRowsA + i / kRowsB) * kDim + d % kDim;
      const int of_b = (round * kRowsB + i % kRowsB) * kDim + d % kDim;
      expected[i] += static_cast<float>(element_of_a(of_a) * element_of_b(of_b));
    }
  }
  Wrong wrong;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> c(expected.size());
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(launch(product_kernel<kMistake>, 1, 256, kSharedBytes, nullptr,
                     Params{a.data(), b.data(), c.data()}),
              cudaSuccess);
    for (size_t i = 0; i < c.size(); ++i) {
      wrong.elements += c[i] != expected[i];
      wrong.nans += std::isnan(c[i]);
    }
  }
  return wrong;
}

// Ends the program if the product is wrong, as the emulation does where it notices the mistake
// itself.
template <Mistake kMistake>
void multiply_or_die() {
  if (multiply<kMistake>().elements == 0) return;
  std::fputs("wrong product\n", stderr);
  std::abort();
}

TEST(EmulationSm90, ProductsOfCopiedOperands) { EXPECT_EQ(multiply<Mistake::kNone>().elements, 0); }

TEST(EmulationSm90, WrongSwizzle) {
  constexpr int kMost = kSeeds * kRowsA * kRowsB * 9 / 10;
  EXPECT_GT(multiply<Mistake::kSwizzle64>().elements, kMost);
  EXPECT_GT(multiply<Mistake::kSwizzle32>().elements, kMost);
  EXPECT_GT(multiply<Mistake::kNoSwizzle>().elements, kMost);
  // Units of the same rows of a and b may have changed places alike.
  EXPECT_GT(multiply<Mistake::kNotAligned>().elements, kMost / 2);
}

TEST(EmulationSm90, AccumulatorsReadBeforeTheWaitAreNaN) {
  EXPECT_EQ(multiply<Mistake::kReadsBeforeWait>().nans, kSeeds * 128);
  EXPECT_EQ(multiply<Mistake::kReadsGroupUnderWay>().nans, kSeeds * 128);
}

TEST(EmulationSm90DeathTest, DataThatIsNotWaitedFor) {
  EXPECT_DEATH(multiply_or_die<Mistake::kDoesNotWaitForData>(), "wrong product|has changed");
  EXPECT_DEATH(multiply_or_die<Mistake::kWaitsForOtherPhase>(),
               "wrong product|has changed|nobody can go on");
}

TEST(EmulationSm90DeathTest, OperandsThatChangeUnderWay) {
  EXPECT_DEATH(multiply_or_die<Mistake::kReleasesBeforeWait>(),
               "shared memory has changed between a wgmma .*sm90.cpp:[0-9]+. and the wait for it");
  EXPECT_DEATH(multiply_or_die<Mistake::kOneWarpReleases>(), "shared memory has changed");
  EXPECT_DEATH(multiply_or_die<Mistake::kDoesNotWaitForSpace>(),
               "wrong product|has changed|nobody can go on");
}

TEST(EmulationSm90DeathTest, AccumulatorsThatChangeUnderWay) {
  EXPECT_DEATH(multiply_or_die<Mistake::kTouchesAccumulator>(), "an accumulator has changed");
}

TEST(EmulationSm90DeathTest, MissingFences) {
  EXPECT_DEATH(multiply_or_die<Mistake::kNoProxyFence>(), "copied without fence_async_proxy");
  EXPECT_DEATH(multiply_or_die<Mistake::kNoFence>(), "without wgmma_fence since the last wait");
}

TEST(EmulationSm90DeathTest, WarpgroupsThatAreNotWhole) {
  EXPECT_DEATH(multiply_or_die<Mistake::kThreeWarps>(),
               "128 to 159 have ended\n.*160 to 255 wait at wgmma_m64n128k16");
}

TEST(EmulationSm90DeathTest, EndWithProductsUnderWay) {
  EXPECT_DEATH(multiply_or_die<Mistake::kEndsUnderWay>(), "a thread ends before it has waited");
}

TEST(EmulationSm90DeathTest, BarrierThatWasNotInitialised) {
  EXPECT_DEATH(multiply_or_die<Mistake::kBarrierNotInitialised>(), "mbarrier that was not init");
}

struct Exchange {
  const uint32_t* in;
  uint32_t* out;  // in, by the other warps of each pair
};

enum class Pairing { kRight, kNoSync, kWrongBarrier, kLeftBehind };

// Warps 0, 1 exchange through barrier 1; warps 2, 3 through barrier 2, of which only warp 3 reads.
template <Pairing kPairing>
__global__ void exchange_kernel(const Exchange params) {
  auto* const shared = ptx::dynamic_shared<uint32_t>();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  shared[thread] = params.in[thread];
  if (warp == 2) {
    ptx::named_barrier_arrive(2, 64);
    return;
  }
  const int barrier = kPairing == Pairing::kWrongBarrier && warp == 1 ? 3 : 1 + warp / 2;
  if (kPairing != Pairing::kNoSync) ptx::named_barrier_sync(barrier, 64);
  if (kPairing == Pairing::kLeftBehind && warp == 0) ptx::named_barrier_arrive(1, 64);
  params.out[thread] = shared[thread ^ 32];
}

template <Pairing kPairing>
void exchange_or_die() {
  std::vector<uint32_t> in(128);
  for (int i = 0; i < 128; ++i) in[i] = 1000 + i;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<uint32_t> out(128);
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(
        launch(exchange_kernel<kPairing>, 1, 128, 512, nullptr, Exchange{in.data(), out.data()}),
        cudaSuccess);
    for (int i = 0; i < 128; ++i) {
      if (i / 32 == 2 || out[i] == in[i ^ 32]) continue;
      std::fputs("wrong exchange\n", stderr);
      std::abort();
    }
  }
}

TEST(EmulationSm90, NamedBarriers) { exchange_or_die<Pairing::kRight>(); }

TEST(EmulationSm90DeathTest, NamedBarriersThatDoNotMatch) {
  EXPECT_DEATH(exchange_or_die<Pairing::kNoSync>(), "wrong exchange|left with 32 threads");
  EXPECT_DEATH(exchange_or_die<Pairing::kWrongBarrier>(), "wait at named_barrier_sync");
  EXPECT_DEATH(exchange_or_die<Pairing::kLeftBehind>(), "named barrier 1 is left with 32 threads");
}

}  // namespace
}  // namespace h2o_prefill
