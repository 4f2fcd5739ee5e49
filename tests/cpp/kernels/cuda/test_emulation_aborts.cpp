// The emulation of CUDA: what is undefined on the hardware stops the program, and the message says
// who did it.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill {
namespace {

constexpr unsigned int kAll = 0xFFFFFFFFU;

struct Params {
  const float* in;
  float* out;
};

using Kernel = void (*)(Params);

// 64 threads with 1024 bytes of shared memory; `in` and `out` are 64 floats.
void run(Kernel kernel) {
  const auto in = std::make_unique<float[]>(64);
  const auto out = std::make_unique<float[]>(64);
  cuda_emulation::set_seed(3);
  static_cast<void>(launch(kernel, 1, 64, 1024, nullptr, Params{in.get(), out.get()}));
}

__global__ void ended_kernel(const Params) {
  if (threadIdx.x == 5) return;
  __syncthreads();
}

TEST(EmulationAbortsDeathTest, BarrierWithoutAThreadThatHasEnded) {
  EXPECT_DEATH(run(ended_kernel),
               "nobody can go on:\n.*0 to 4 wait at __syncthreads, .*aborts.cpp:[0-9]+\n"
               ".*5 to 5 have ended\n.*6 to 63 wait");
}

__global__ void two_barriers_kernel(const Params) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(EmulationAbortsDeathTest, TwoDifferentBarriers) {
  EXPECT_DEATH(run(two_barriers_kernel), "while thread [0-9]+ is at that of .*aborts.cpp");
}

__global__ void barrier_and_shuffle_kernel(const Params params) {
  if (threadIdx.x == 40) {
    __syncthreads();
  } else {
    params.out[threadIdx.x] = __shfl_xor_sync(kAll, params.in[threadIdx.x], 1);
  }
}

TEST(EmulationAbortsDeathTest, ShuffleWithoutALaneThatIsAtABarrier) {
  EXPECT_DEATH(run(barrier_and_shuffle_kernel),
               "32 to 39 wait at __shfl_xor_sync.*\n.*40 to 40 wait at __syncthreads");
}

__global__ void apart_kernel(const Params params) {
  uint32_t a[4] = {};
  float c[4] = {};
  if (threadIdx.x % 2 == 0) {
    ptx::mma_m16n8k16<DType::kFloat16>(c, a, 0, 0);
  } else {
    ptx::ldmatrix_x4(a, ptx::dynamic_shared<char>());
  }
  params.out[threadIdx.x] = c[0];
}

TEST(EmulationAbortsDeathTest, LanesAtDifferentCollectives) {
  EXPECT_DEATH(run(apart_kernel), "lanes of a warp are apart: at (mma_m16n8k16|ldmatrix_x4) ");
}

__global__ void same_collective_apart_kernel(const Params) {
  if (threadIdx.x % 2 == 0) {
    __syncwarp();
  } else {
    __syncwarp();
  }
}

TEST(EmulationAbortsDeathTest, LanesAtTheSameCollectiveOfDifferentLines) {
  EXPECT_DEATH(run(same_collective_apart_kernel), "lanes of a warp are apart: at __syncwarp");
}

__global__ void some_lanes_kernel(const Params) {
  if (threadIdx.x % 32 < 16) __ballot_sync(0xFFFFU, 1);
}

TEST(EmulationAbortsDeathTest, CollectiveOfSomeLanes) {
  EXPECT_DEATH(run(some_lanes_kernel), "a collective of some lanes only, mask 0000ffff");
}

__global__ void misaligned_shared_kernel(const Params params) {
  ptx::cp_async_16(ptx::dynamic_shared<char>() + 8, params.in, true);
}

__global__ void misaligned_global_kernel(const Params params) {
  ptx::cp_async_16(ptx::dynamic_shared<char>(), params.in + 2, true);
}

__global__ void misaligned_row_kernel(const Params) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::dynamic_shared<char>() + threadIdx.x * 24);
}

__global__ void misaligned_vector_kernel(const Params params) {
  reinterpret_cast<float4*>(params.out + 1)->x = 1.0F;
}

TEST(EmulationAbortsDeathTest, MisalignedAddresses) {
  EXPECT_DEATH(run(misaligned_shared_kernel), "cp_async_16 at an address that is not a multiple");
  EXPECT_DEATH(run(misaligned_global_kernel), "cp_async_16 at an address that is not a multiple");
  EXPECT_DEATH(run(misaligned_row_kernel), "ldmatrix_x4 at an address that is not a multiple");
  EXPECT_DEATH(run(misaligned_vector_kernel), "misaligned address");
}

__global__ void store_overrun_kernel(const Params) {
  ptx::dynamic_shared<float>()[193 + threadIdx.x] = 0.0F;
}

__global__ void copy_overrun_kernel(const Params params) {
  ptx::cp_async_16(ptx::dynamic_shared<float>() + 1024 / 4, params.in, true);
}

__global__ void row_overrun_kernel(const Params) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::dynamic_shared<char>() + 1024 - 16 * 16 + threadIdx.x % 32 * 16);
}

__global__ void global_row_kernel(const Params params) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, params.in);
}

TEST(EmulationAbortsDeathTest, MoreSharedMemoryThanAskedFor) {
  EXPECT_DEATH(run(store_overrun_kernel), "heap-buffer-overflow");
  EXPECT_DEATH(run(copy_overrun_kernel), "cp_async_16 at offset 1024 of 1024 bytes");
  EXPECT_DEATH(run(row_overrun_kernel), "ldmatrix_x4 at offset 1[0-9]+ of 1024 bytes");
  EXPECT_DEATH(run(global_row_kernel), "ldmatrix_x4 at offset -?[0-9]+ of 1024 bytes");
}

__global__ void global_overrun_kernel(const Params params) {
  ptx::cp_async_16(ptx::dynamic_shared<float>(), params.in + 64, true);
}

__global__ void not_valid_kernel(const Params params) {
  ptx::cp_async_16(ptx::dynamic_shared<float>(), params.in + 64, false);
}

TEST(EmulationAbortsDeathTest, CopyFromBehindATensor) {
  EXPECT_DEATH(run(global_overrun_kernel), "heap-buffer-overflow");
  run(not_valid_kernel);
}

}  // namespace
}  // namespace h2o_prefill
