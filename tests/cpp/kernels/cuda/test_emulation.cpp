// The emulation of CUDA: what correct kernels may rely on.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill {
namespace {

constexpr int kSeeds = 6;
constexpr DType kBFloat16 = DType::kBFloat16;
constexpr DType kFloat16 = DType::kFloat16;

struct TraceParams {
  std::vector<int>* trace;
};

__global__ void trace_kernel(const TraceParams params) {
  const unsigned int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  for (int step = 0; step < 2; ++step) {
    params.trace->push_back(static_cast<int>((block * 2 + step) * 128 + thread));
    __syncthreads();
  }
}

std::vector<int> trace(uint64_t seed) {
  std::vector<int> order;
  cuda_emulation::set_seed(seed);
  EXPECT_EQ(launch(trace_kernel, dim3(3, 2, 2), dim3(8, 4, 4), 0, nullptr, TraceParams{&order}),
            cudaSuccess);
  return order;
}

TEST(Emulation, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> all = trace(0);
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), 3 * 2 * 2 * 2 * 128);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], i);
}

TEST(Emulation, TheSeedChoosesTheOrder) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(trace(seed), trace(seed));
    EXPECT_NE(trace(seed), trace(seed + 1));
  }
}

// In blocks of 128 entries, one step of a block each, nobody is in the next step.
TEST(Emulation, NobodyPassesABarrierBeforeAllHaveCome) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::vector<int> order = trace(seed);
    for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i] / 128, order[i / 128 * 128] / 128);
  }
}

struct OutParams {
  uint32_t* out;
};

__global__ void untouched_kernel(const OutParams params) {
  params.out[threadIdx.x] = ptx::dynamic_shared<uint32_t>()[threadIdx.x];
  ptx::dynamic_shared<uint32_t>()[threadIdx.x] = 0;
}

TEST(Emulation, SharedMemoryBeginsAsNaN) {
  std::vector<uint32_t> out(32);
  ASSERT_EQ(launch(untouched_kernel, 2, 32, 128, nullptr, OutParams{out.data()}), cudaSuccess);
  for (const uint32_t bits : out) {
    EXPECT_TRUE(std::isnan(__uint_as_float(bits)));
    EXPECT_TRUE(std::isnan(ptx::to_float<kBFloat16>(static_cast<uint16_t>(bits))));
    EXPECT_TRUE(std::isnan(ptx::to_float<kFloat16>(static_cast<uint16_t>(bits))));
  }
}

struct CopyParams {
  const uint32_t* in;
  uint32_t* out;  // [32, 8]
};

__global__ void copy_kernel(const CopyParams params) {
  auto* shared = ptx::dynamic_shared<uint32_t>() + threadIdx.x * 8;
  const uint32_t* in = params.in + threadIdx.x * 8;
  uint32_t* out = params.out + threadIdx.x * 8;
  ptx::cp_async_16(shared, in, true);
  ptx::cp_async_commit();
  ptx::cp_async_4(shared + 4, in + 4, true);
  ptx::cp_async_4(shared + 5, nullptr, false);
  ptx::cp_async_commit();
  ptx::cp_async_4(shared + 6, in + 6, true);  // of no group yet
  out[0] = shared[0];
  ptx::cp_async_wait<1>();
  out[1] = shared[1];
  out[2] = shared[4];
  ptx::cp_async_wait<0>();
  out[3] = shared[3];
  out[4] = shared[4];
  out[5] = shared[5];
  out[6] = shared[6];
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  out[7] = shared[6];
}

TEST(Emulation, AsynchronousCopiesAreThereAfterTheWaitForTheirGroup) {
  std::vector<uint32_t> in(32 * 8, 7);
  std::vector<uint32_t> out(32 * 8);
  ASSERT_EQ(launch(copy_kernel, 1, 32, 1024, nullptr, CopyParams{in.data(), out.data()}),
            cudaSuccess);
  constexpr uint32_t kNotThere = 0xFFFFFFFFU;
  constexpr uint32_t kExpected[8] = {kNotThere, 7, kNotThere, 7, 7, 0, kNotThere, 7};
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], kExpected[i % 8]) << i;
}

__global__ void shuffle_kernel(const OutParams params) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t mine = 100 + threadIdx.x;
  uint32_t* out = params.out + lane * 10;
  constexpr unsigned int kAll = 0xFFFFFFFFU;
  out[0] = __shfl_sync(kAll, mine, lane + 3);
  out[1] = __shfl_sync(kAll, mine, 1, 8);
  out[2] = __shfl_xor_sync(kAll, mine, 5);
  out[3] = __shfl_xor_sync(kAll, mine, 12, 8);
  out[4] = __shfl_up_sync(kAll, mine, 2);
  out[5] = __shfl_up_sync(kAll, mine, 2, 8);
  out[6] = __shfl_down_sync(kAll, mine, 2);
  out[7] = __shfl_down_sync(kAll, mine, 2, 8);
  out[8] = __ballot_sync(kAll, lane % 3 == 0);
  out[9] = static_cast<uint32_t>(__any_sync(kAll, lane == 9)) * 8 +
           __any_sync(kAll, lane > 31) * 4 + __all_sync(kAll, lane < 32) * 2 +
           __all_sync(kAll, lane != 9);
}

TEST(Emulation, ShufflesAndVotes) {
  std::vector<uint32_t> out(32 * 10);
  ASSERT_EQ(launch(shuffle_kernel, 1, 32, 0, nullptr, OutParams{out.data()}), cudaSuccess);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t segment = lane / 8 * 8;
    const uint32_t* mine = &out[lane * 10];
    EXPECT_EQ(mine[0], 100 + (lane + 3) % 32);
    EXPECT_EQ(mine[1], 100 + segment + 1);
    EXPECT_EQ(mine[2], 100 + (lane ^ 5));
    // Later segments are out of reach, earlier ones are not.
    EXPECT_EQ(mine[3], 100 + ((lane ^ 12) < segment + 8 ? lane ^ 12 : lane));
    EXPECT_EQ(mine[4], 100 + (lane < 2 ? lane : lane - 2));
    EXPECT_EQ(mine[5], 100 + (lane < segment + 2 ? lane : lane - 2));
    EXPECT_EQ(mine[6], 100 + (lane > 29 ? lane : lane + 2));
    EXPECT_EQ(mine[7], 100 + (lane > segment + 5 ? lane : lane + 2));
    EXPECT_EQ(mine[8], 0x49249249U);
    EXPECT_EQ(mine[9], 8 + 2);
  }
}

TEST(Emulation, RoundsToNearestEven) {
  EXPECT_EQ(ptx::from_float<kBFloat16>(1.00390625F), 0x3F80);  // between two: to the even one
  EXPECT_EQ(ptx::from_float<kBFloat16>(1.01171875F), 0x3F82);
  EXPECT_EQ(ptx::from_float<kFloat16>(1.00048828125F), 0x3C00);
  EXPECT_EQ(ptx::from_float<kFloat16>(65520.0F), 0x7C00);  // inf
  EXPECT_EQ(ptx::pack_pair<kBFloat16>(1.0F, -2.0F), 0xC0003F80U);
  EXPECT_EQ(ptx::pack_pair<kFloat16>(1.0F, -2.0F), 0xC0003C00U);
  EXPECT_EQ(ptx::from_float<kBFloat16>(-NAN), 0x7FFF);
}

TEST(Emulation, ExponentialsAndLogarithmsAtTheirEnds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ptx::exp2(-kInf), 0.0F);
  EXPECT_EQ(ptx::exp2(-127.0F), 0.0F);  // subnormal
  EXPECT_EQ(ptx::exp2(10.0F), 1024.0F);
  EXPECT_EQ(ptx::log2(0.0F), -kInf);
  EXPECT_EQ(ptx::log2(1e-40F), -kInf);  // subnormal
  EXPECT_TRUE(std::isnan(ptx::log2(-1.0F)));
}

__global__ void nothing_kernel(const OutParams params) { params.out[0] += 1; }

TEST(Emulation, LaunchesObeyTheLimitsOfTheHardware) {
  uint32_t runs = 0;
  const OutParams params{&runs};
  EXPECT_EQ(launch(nothing_kernel, dim3(1, 0), 32, 0, nullptr, params), cudaSuccess);
  EXPECT_EQ(launch(nothing_kernel, dim3(1, 65536), 32, 0, nullptr, params),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nothing_kernel, 1, 1056, 0, nullptr, params), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nothing_kernel, 1, 32, kMaxSharedBytes + 1, nullptr, params),
            cudaErrorInvalidValue);
  EXPECT_EQ(runs, 0U);
  EXPECT_EQ(launch(nothing_kernel, 2, 1024, kMaxSharedBytes, nullptr, params), cudaSuccess);
  EXPECT_EQ(runs, 2048U);
}

}  // namespace
}  // namespace h2o_prefill
