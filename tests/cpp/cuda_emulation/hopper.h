// Instructions of sm_90a: barriers in shared memory, barriers of some warps, and matrix products
// that a warpgroup issues and waits for.
//
// Undefined on the hardware and stopped here: a barrier that was not initialised, a product issued
// without the fences that it needs, operands or accumulators that change before the wait, operands
// in registers that change between a fence and the issue or between the wait and a fence, a thread
// that ends with products under way. Accumulators are NaN from the issue to the wait.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_emulation/site.h"
#include "kernels/params.h"

namespace cuda_emulation::hopper {

// For the scheduler.
void begin_block(int threads);
void end_thread();
void end_block();

// Barriers are their 8 bytes. cp_async_mbarrier_arrive() brings the copies that this thread has
// begun: the data is there when the phase ends.
void mbarrier_init(uint64_t* barrier, uint32_t count, Site site = Site::here());
void mbarrier_arrive(uint64_t* barrier, Site site = Site::here());
void cp_async_mbarrier_arrive(uint64_t* barrier, Site site = Site::here());
bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity, Site site = Site::here());
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Site site = Site::here());

void named_barrier_sync(int barrier, int threads, Site site = Site::here());
void named_barrier_arrive(int barrier, int threads, Site site = Site::here());

void fence_async_proxy();
void wgmma_fence();

// Where b lies in shared memory: its columns one after the other, or its rows ("N-major").
enum class Major { kColumns, kRows };

// Operands of a thread. a is in shared memory, or in the thread's 4 registers.
struct Operands {
  h2o_prefill::DType dtype;
  int columns;
  uint64_t a;
  const uint32_t* a_registers;  // or null
  uint64_t b;
  Major b_major;
};

// c[64, columns] = a[64, 16] b[16, columns], plus c if add. Register i of c of this thread.
void wgmma(const char* name, const Operands& operands, float* c, bool add, Site site);
void fence_operand(const uint32_t (&a)[4], Site site = Site::here());
void wgmma_commit();
void wgmma_wait(int pending, Site site);

}  // namespace cuda_emulation::hopper
