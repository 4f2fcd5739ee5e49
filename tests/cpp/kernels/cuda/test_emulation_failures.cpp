// The emulation of CUDA: mistakes in kernels must show. Every kernel here is right with kRight and
// has one mistake without.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <vector>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill {
namespace {

constexpr int kSeeds = 8;
constexpr int kThreads = 64;
constexpr size_t kSharedBytes = 4096;

struct Params {
  const uint32_t* in;
  uint32_t* out;
};

using Kernel = void (*)(Params);

// Seeds for which out[i] is not in[(i + shift) % kThreads].
int wrong_seeds(Kernel kernel, int shift) {
  std::vector<uint32_t> in(kThreads);
  for (int i = 0; i < kThreads; ++i) in[i] = 1000 + i;
  int wrong = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<uint32_t> out(kThreads);
    cuda_emulation::set_seed(seed);
    EXPECT_EQ(launch(kernel, 1, kThreads, kSharedBytes, nullptr, Params{in.data(), out.data()}),
              cudaSuccess);
    bool right = true;
    for (int i = 0; i < kThreads; ++i) right = right && out[i] == in[(i + shift) % kThreads];
    wrong += !right;
  }
  return wrong;
}

template <bool kRight>
__global__ void exchange_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  shared[threadIdx.x] = params.in[threadIdx.x];
  if (kRight) __syncthreads();
  params.out[threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
}

TEST(EmulationFailures, MissingBarrierBeforeReading) {
  EXPECT_EQ(wrong_seeds(exchange_kernel<true>, 32), 0);
  EXPECT_EQ(wrong_seeds(exchange_kernel<false>, 32), kSeeds);
}

template <bool kRight>
__global__ void reuse_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  shared[threadIdx.x] = params.in[threadIdx.x];
  __syncthreads();
  params.out[threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
  if (kRight) __syncthreads();
  shared[threadIdx.x] = 0;
}

TEST(EmulationFailures, MissingBarrierBeforeWritingAgain) {
  EXPECT_EQ(wrong_seeds(reuse_kernel<true>, 32), 0);
  EXPECT_EQ(wrong_seeds(reuse_kernel<false>, 32), kSeeds);
}

// Only one order of the two warps is wrong here.
template <bool kRight>
__global__ void produce_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  if (threadIdx.x < 32) {
    for (int i = 0; i < 2; ++i) shared[32 * i + threadIdx.x] = params.in[32 * i + threadIdx.x];
  }
  if (kRight) __syncthreads();
  if (threadIdx.x >= 32) {
    for (int i = 0; i < 2; ++i)
      params.out[32 * i + threadIdx.x - 32] = shared[32 * i + threadIdx.x - 32];
  }
}

TEST(EmulationFailures, MissingBarrierThatMattersInOneOrderOnly) {
  EXPECT_EQ(wrong_seeds(produce_kernel<true>, 0), 0);
  const int wrong = wrong_seeds(produce_kernel<false>, 0);
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, kSeeds);  // so more than one seed is needed
}

template <bool kRight>
__global__ void warp_exchange_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  const unsigned int warp = threadIdx.x / 32 * 32;
  const unsigned int from = (threadIdx.x + 1) % kThreads;
  shared[threadIdx.x] = params.in[from];
  if (kRight) __syncwarp();
  params.out[warp + (threadIdx.x + 1) % 32] = shared[warp + (threadIdx.x + 1) % 32];
}

TEST(EmulationFailures, MissingSyncwarp) {
  EXPECT_EQ(wrong_seeds(warp_exchange_kernel<true>, 1), 0);
  EXPECT_EQ(wrong_seeds(warp_exchange_kernel<false>, 1), kSeeds);
}

template <bool kRight>
__global__ void wait_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  ptx::cp_async_4(shared + threadIdx.x, params.in + threadIdx.x, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<kRight ? 0 : 1>();
  __syncthreads();
  params.out[threadIdx.x] = shared[threadIdx.x];
}

TEST(EmulationFailures, CopyThatIsNotWaitedFor) {
  EXPECT_EQ(wrong_seeds(wait_kernel<true>, 0), 0);
  EXPECT_EQ(wrong_seeds(wait_kernel<false>, 0), kSeeds);
}

template <bool kRight>
__global__ void copy_exchange_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  ptx::cp_async_4(shared + threadIdx.x, params.in + threadIdx.x, true);
  ptx::cp_async_commit();
  if (!kRight) __syncthreads();
  ptx::cp_async_wait<0>();
  if (kRight) __syncthreads();
  params.out[threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
}

TEST(EmulationFailures, CopyOfAnotherThreadWaitedForAfterTheBarrier) {
  EXPECT_EQ(wrong_seeds(copy_exchange_kernel<true>, 32), 0);
  EXPECT_EQ(wrong_seeds(copy_exchange_kernel<false>, 32), kSeeds);
}

template <bool kRight>
__global__ void overwrite_kernel(const Params params) {
  auto* shared = ptx::dynamic_shared<uint32_t>();
  shared[threadIdx.x] = params.in[threadIdx.x];
  __syncthreads();
  if (kRight) params.out[threadIdx.x] = shared[threadIdx.x];
  ptx::cp_async_4(shared + threadIdx.x, params.in + threadIdx.x, true);  // the same numbers
  ptx::cp_async_commit();
  if (!kRight) params.out[threadIdx.x] = shared[threadIdx.x];
  ptx::cp_async_wait<0>();
}

TEST(EmulationFailures, CopyIntoWhatIsStillRead) {
  EXPECT_EQ(wrong_seeds(overwrite_kernel<true>, 0), 0);
  EXPECT_EQ(wrong_seeds(overwrite_kernel<false>, 0), kSeeds);
}

// A unit of 8 elements in a tile with rows of `units` units.
using Place = int (*)(int row, int unit, int units);

int in_order(int row, int unit, int units) { return row * units + unit; }

struct ProductParams {
  const uint16_t* a;  // [16, dim] float16
  const uint16_t* b;  // [16, dim]
  float* c;           // [16, 16] = a b^T
  int dim;
  Place stored_at;
  Place looked_for_at;
};

__global__ void product_kernel(const ProductParams params) {
  const int units = params.dim / layout::kUnitElements;
  auto* a_tile = ptx::dynamic_shared<uint16_t>();
  uint16_t* b_tile = a_tile + 16 * params.dim;
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 16 * units; i += 32) {
    const int to = params.stored_at(i / units, i % units, units) * layout::kUnitElements;
    ptx::cp_async_16(a_tile + to, params.a + i * layout::kUnitElements, true);
    ptx::cp_async_16(b_tile + to, params.b + i * layout::kUnitElements, true);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  const auto row = [&](const uint16_t* tile, int row, int unit) {
    return tile + params.looked_for_at(row, unit, units) * layout::kUnitElements;
  };
  float c[2][4] = {};
  for (int unit = 0; unit < units; unit += 2) {
    uint32_t a[4];
    uint32_t b[4];
    ptx::ldmatrix_x4(a, row(a_tile, layout::load_a_row(lane), unit + layout::load_a_unit(lane)));
    ptx::ldmatrix_x4(b, row(b_tile, layout::load_b_row(lane), unit + layout::load_b_unit(lane)));
    ptx::mma_m16n8k16<DType::kFloat16>(c[0], a, b[0], b[1]);
    ptx::mma_m16n8k16<DType::kFloat16>(c[1], a, b[2], b[3]);
  }
  for (int i = 0; i < 8; ++i) {
    const int column = layout::accumulator_column(lane, i % 4) + 8 * (i / 4);
    params.c[layout::accumulator_row(lane, i % 4) * 16 + column] = c[i / 4][i % 4];
  }
}

class Swizzled : public ::testing::TestWithParam<int> {  // head_dim
 protected:
  // Elements that differ from the product.
  int wrong_products(Place stored_at, Place looked_for_at) const {
    const int dim = GetParam();
    std::vector<uint16_t> a(16 * dim);
    std::vector<uint16_t> b(16 * dim);
    for (int i = 0; i < 16 * dim; ++i) {
      a[i] = ptx::from_float<DType::kFloat16>(static_cast<float>(element_of_a(i)));
      b[i] = ptx::from_float<DType::kFloat16>(static_cast<float>(element_of_b(i)));
    }
    std::vector<float> c(16 * 16);
    const ProductParams params{a.data(), b.data(), c.data(), dim, stored_at, looked_for_at};
    EXPECT_EQ(launch(product_kernel, 1, 32, 2 * a.size() * sizeof(uint16_t), nullptr, params),
              cudaSuccess);
    int wrong = 0;
    for (int i = 0; i < 16 * 16; ++i) {
      int sum = 0;
      for (int d = 0; d < dim; ++d) {
        sum += element_of_a(i / 16 * dim + d) * element_of_b(i % 16 * dim + d);
      }
      wrong += c[i] != static_cast<float>(sum);
    }
    return wrong;
  }

 private:
  static int element_of_a(int i) { return i * 37 % 23 - 11; }
  static int element_of_b(int i) { return i * 29 % 19 - 9; }
};

TEST_P(Swizzled, RightWithoutBankConflict) {
  cuda_emulation::ldmatrix_conflicts = 0;
  EXPECT_EQ(wrong_products(layout::swizzle, layout::swizzle), 0);
  EXPECT_EQ(cuda_emulation::ldmatrix_conflicts, 0);
}

TEST_P(Swizzled, ConflictsAreCounted) {
  cuda_emulation::ldmatrix_conflicts = 0;
  EXPECT_EQ(wrong_products(in_order, in_order), 0);
  // All matrices: 4 of a and 4 of b in every 16 columns.
  EXPECT_EQ(cuda_emulation::ldmatrix_conflicts, GetParam() / 16 * 8);
}

TEST_P(Swizzled, WrongSwizzle) {
  EXPECT_GT(wrong_products(layout::swizzle, in_order), 100);
  EXPECT_GT(wrong_products(in_order, layout::swizzle), 100);
}

INSTANTIATE_TEST_SUITE_P(EmulationFailures, Swizzled, ::testing::Values(64, 96, 128, 256));

}  // namespace
}  // namespace h2o_prefill
