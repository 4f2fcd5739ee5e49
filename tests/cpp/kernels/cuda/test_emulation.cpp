// The emulation of CUDA: correct kernels get their results, and mistakes in kernels show.
#include "cuda_emulation/cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <vector>

#include "cuda_emulation/fiber.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace h2o_prefill {
namespace {

constexpr int kSeeds = 8;
constexpr DType kBFloat16 = DType::kBFloat16;
constexpr DType kFloat16 = DType::kFloat16;

struct Params {
  const uint32_t* in;
  uint32_t* out;
  bool right = true;  // without the mistake of the kernel
};

using Kernel = void (*)(Params);

// Runs one warp; each lane writes to `width` numbers of the result.
std::vector<uint32_t> run_warp(Kernel kernel, int width) {
  const std::vector<uint32_t> in(32 * 16, 7);
  std::vector<uint32_t> out(32 * width);
  EXPECT_EQ(launch(kernel, 1, 32, 2048, nullptr, Params{in.data(), out.data()}), cudaSuccess);
  return out;
}

__global__ void untouched_kernel(const Params params) {
  params.out[threadIdx.x] = ptx::dynamic_shared<uint32_t>()[threadIdx.x];
  ptx::dynamic_shared<uint32_t>()[threadIdx.x] = 0;
}

TEST(Emulation, SharedMemoryOfEveryBlockBeginsAsNaN) {
  for (int block = 0; block < 2; ++block) {
    for (const uint32_t bits : run_warp(untouched_kernel, 1)) {
      EXPECT_TRUE(std::isnan(__uint_as_float(bits)));
      EXPECT_TRUE(std::isnan(ptx::to_float<kBFloat16>(static_cast<uint16_t>(bits))));
      EXPECT_TRUE(std::isnan(ptx::to_float<kFloat16>(static_cast<uint16_t>(bits))));
    }
  }
}

__global__ void count_kernel(const Params params) { params.out[0] += 1; }

TEST(Emulation, LaunchesObeyTheLimitsOfTheHardware) {
  uint32_t runs = 0;
  const auto run = [&](dim3 grid, int threads, size_t bytes) {
    return launch(count_kernel, grid, threads, bytes, nullptr, Params{nullptr, &runs});
  };
  EXPECT_EQ(run(dim3(1, 0), 32, 0), cudaSuccess);
  EXPECT_EQ(run(dim3(1, 65536), 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(run(1, 1056, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(run(1, 32, kMaxSharedBytes + 1), cudaErrorInvalidValue);
  EXPECT_EQ(runs, 0U);
  EXPECT_EQ(run(2, 1024, kMaxSharedBytes), cudaSuccess);
  EXPECT_EQ(runs, 2048U);
}

// Mistakes that give wrong results. Thread i of 64 finds thread i + shift's number.

constexpr unsigned int kThreads = 64;

uint32_t* shared() { return ptx::dynamic_shared<uint32_t>(); }
unsigned int opposite() { return (threadIdx.x + 32) % kThreads; }

void copy_mine(const Params& params) {
  const unsigned int i = threadIdx.x;
  if (i % 4 == 0) ptx::cp_async_16(shared() + i, params.in + i, true);
  ptx::cp_async_commit();
}

struct Race {
  const char* name;
  int shift;
  Kernel kernel;
  bool in_one_order_only = false;
};

void PrintTo(const Race& race, std::ostream* out) { *out << race.name; }

const Race kRaces[] = {
    {"MissingBarrierBeforeReading", 32,
     [](Params params) {
       shared()[threadIdx.x] = params.in[threadIdx.x];
       if (params.right) __syncthreads();
       params.out[threadIdx.x] = shared()[opposite()];
     }},
    {"MissingSyncwarp", 1,
     [](Params params) {
       const unsigned int next = threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32;
       shared()[threadIdx.x] = params.in[(threadIdx.x + 1) % kThreads];
       if (params.right) __syncwarp();
       params.out[next] = shared()[next];
     }},
    {"NamedBarrierThatDoesNotWait", 0,
     [](Params params) {
       if (threadIdx.x < 32) {
         for (const unsigned int i : {threadIdx.x, opposite()}) shared()[i] = params.in[i];
         ptx::named_barrier_arrive(2, 64);
       } else {
         params.right ? ptx::named_barrier_sync(2, 64) : ptx::named_barrier_arrive(2, 64);
         for (const unsigned int i : {threadIdx.x, opposite()}) params.out[i] = shared()[i];
       }
     },
     /*in_one_order_only=*/true},
    {"CopyThatIsNotWaitedFor", 0,
     [](Params params) {
       copy_mine(params);
       params.right ? ptx::cp_async_wait<0>() : ptx::cp_async_wait<1>();
       __syncthreads();
       params.out[threadIdx.x] = shared()[threadIdx.x];
     }},
    {"CopyOfAnotherThreadWaitedForAfterTheBarrier", 32,
     [](Params params) {
       copy_mine(params);
       if (!params.right) __syncthreads();
       ptx::cp_async_wait<0>();
       if (params.right) __syncthreads();
       params.out[threadIdx.x] = shared()[opposite()];
     }},
};

class Races : public ::testing::TestWithParam<Race> {
 protected:
  int wrong_seeds(bool right) const {
    std::vector<uint32_t> in(kThreads), expected(kThreads);
    for (unsigned int i = 0; i < kThreads; ++i) {
      in[i] = 1000 + i;
      expected[i] = 1000 + (i + GetParam().shift) % kThreads;
    }
    int wrong = 0;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<uint32_t> out(kThreads);
      cuda_emulation::set_seed(seed);
      EXPECT_EQ(launch(GetParam().kernel, 1, kThreads, 4096, nullptr,
                       Params{in.data(), out.data(), right}),
                cudaSuccess);
      wrong += out != expected;
    }
    return wrong;
  }
};

TEST_P(Races, GiveWrongResults) {
  EXPECT_EQ(wrong_seeds(/*right=*/true), 0);
  const int wrong = wrong_seeds(/*right=*/false);
  EXPECT_GT(wrong, 0);
  EXPECT_EQ(wrong < kSeeds, GetParam().in_one_order_only) << "so more than one seed is needed";
}

INSTANTIATE_TEST_SUITE_P(Emulation, Races, ::testing::ValuesIn(kRaces));

// Mistakes that are undefined on the hardware stop the program, and the message says who made them.
// Blocks have 64 threads and 1024 bytes of shared memory; `in` and `out` are 64 numbers.

char* shared_bytes() { return ptx::dynamic_shared<char>(); }

void load_matrix(const void* row) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, row);
}

struct Misuse {
  const char* name;
  Kernel kernel;
  const char* message;
};

void PrintTo(const Misuse& misuse, std::ostream* out) { *out << misuse.name; }

const Misuse kMisuses[] = {
    {"BarrierWithoutAThreadThatHasEnded",
     [](Params) {
       if (threadIdx.x != 5) __syncthreads();
     },
     "nobody can go on:\n.*0 to 4 wait at __syncthreads, .*test_emulation.cpp:[0-9]+\n"
     ".*5 to 5 have ended\n.*6 to 63 wait"},
    {"LanesAtDifferentCollectives",
     [](Params) { threadIdx.x % 2 ? __syncwarp() : load_matrix(shared_bytes()); },
     "lanes of a warp are apart: at (__syncwarp|ldmatrix_x4) "},
    {"CollectiveOfSomeLanes",
     [](Params) {
       if (threadIdx.x % 32 < 16) __ballot_sync(0xFFFFU, 1);
     },
     "a collective of some lanes only, mask 0000ffff"},
    {"NamedBarrierThatIsNotComplete",
     [](Params) {
       if (threadIdx.x < 32) ptx::named_barrier_arrive(1, 64);
     },
     "named barrier 1 is left with 32 threads"},
    {"MisalignedCopyToSharedMemory",
     [](Params params) { ptx::cp_async_16(shared_bytes() + 8, params.in, true); },
     "cp_async_16 at an address that is not a multiple of 16"},
#if defined(H2O_ADDRESS_SANITIZER)
    {"MisalignedVector", [](Params params) { reinterpret_cast<float4*>(params.out + 1)->x = 1; },
     "misaligned address"},
    {"StoreAfterSharedMemory", [](Params) { shared()[193 + threadIdx.x] = 0; },
     "heap-buffer-overflow"},
#endif
    {"RowsAfterSharedMemory",
     [](Params) { load_matrix(shared_bytes() + 1024 - 16 * 16 + threadIdx.x % 32 * 16); },
     "ldmatrix_x4 at offset 1[0-9]+ of 1024 bytes"},
};

void run_block(Kernel kernel) {
  const auto in = std::make_unique<uint32_t[]>(64), out = std::make_unique<uint32_t[]>(64);
  cuda_emulation::set_seed(3);
  static_cast<void>(launch(kernel, 1, 64, 1024, nullptr, Params{in.get(), out.get()}));
}

class MisuseDeathTest : public ::testing::TestWithParam<Misuse> {};

TEST_P(MisuseDeathTest, StopsTheProgram) {
  EXPECT_DEATH(run_block(GetParam().kernel), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(Emulation, MisuseDeathTest, ::testing::ValuesIn(kMisuses));

}  // namespace
}  // namespace h2o_prefill
