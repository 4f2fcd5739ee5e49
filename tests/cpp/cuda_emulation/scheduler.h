// Runs a grid of threads on the host: blocks one after the other, the threads of a block as fibres
// in an order that a seed chooses.
//
// A thread runs until it waits: at __syncthreads() for its block, at a collective for its warp.
// Then another one goes on that can. Blocks run in a random order. With an even seed some warps run
// ahead as far as they can, others after the next barrier; with an odd one warps take turns at
// random. Lanes of a warp always run in a random order. A missing barrier shows with one of a few
// seeds.
//
// Stricter than the hardware, to find undefined behaviour: all threads of a block, none of
// which has ended, meet at the same __syncthreads(); all 32 lanes of a warp at the same collective.
// Anything else stops the program with a message that names who waits where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda_emulation/copies.h"
#include "cuda_emulation/site.h"

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

// As in a kernel.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace cuda_emulation {

constexpr int kWarpSize = 32;
constexpr int kWarpgroupSize = 128;

// Chooses the order of threads and blocks in the launches that follow.
void set_seed(uint64_t seed);

// Runs body() once a thread. Blocks are whole warps.
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

// The block's shared memory: exactly as large as asked for, all bytes 0xFF at first, which are NaN
// in every floating-point format and -1 in integers.
void* shared_memory();

// __syncthreads().
void block_barrier(Site site);

// Meets the other lanes of the warp. The last one to come runs execute(arguments), if there is one,
// with what every lane gave; then all go on.
void warp_collective(const char* name, void* argument, void (*execute)(void* const* arguments),
                     Site site);

// The same for the 4 warps of a warpgroup.
void warpgroup_collective(const char* name, void* argument, void (*execute)(void* const* arguments),
                          Site site);

// Stops this thread until somebody wakes those that wait for `what`.
void wait_for(const char* name, const void* what, Site site);
void wake(const void* what);

// Number of this thread in its block.
int thread_index();

// The asynchronous copies of this thread into shared memory (see Copies).
Copies& copies();

// Stop the program unless `address` is a multiple of `bytes`, and for the second one unless as many
// bytes of shared memory are there.
void check_alignment(const char* name, const void* address, size_t bytes, Site site);
void check_shared(const char* name, const void* address, size_t bytes, Site site);

// Where `address` lies in the window of shared memory, and the `bytes` that lie there. The block's
// memory begins at a multiple of 128 that is none of 256.
uint32_t shared_address(const void* address);
unsigned char* at_shared_address(const char* name, uint32_t address, size_t bytes, Site site);

// Stops the program with a message that names the thread, and where it is.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_at(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace cuda_emulation
