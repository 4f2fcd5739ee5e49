// Stands in for csrc/kernels/cuda/ptx_sm90.cuh: the same functions with the semantics of the PTX
// ISA.
#pragma once

#include "cuda_emulation/hopper.h"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill::ptx {

using Mbarrier = uint64_t;

using cuda_emulation::hopper::cp_async_mbarrier_arrive;
using cuda_emulation::hopper::fence_async_proxy;
using cuda_emulation::hopper::fence_operand;
using cuda_emulation::hopper::mbarrier_arrive;
using cuda_emulation::hopper::mbarrier_init;
using cuda_emulation::hopper::mbarrier_try_wait;
using cuda_emulation::hopper::mbarrier_wait;
using cuda_emulation::hopper::named_barrier_arrive;
using cuda_emulation::hopper::named_barrier_sync;
using cuda_emulation::hopper::wgmma_commit;
using cuda_emulation::hopper::wgmma_fence;

template <int registers>
void decrease_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
}
template <int registers>
void increase_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
}

template <int pending>
void wgmma_wait(Site site = Site::here()) {
  static_assert(pending >= 0);
  cuda_emulation::hopper::wgmma_wait(pending, site);
}

template <int n>
void fence_accumulators(float (&)[n]) {}

template <DType dtype>
void wgmma_m64n128k16(float (&c)[64], uint64_t a, uint64_t b, bool add, Site site = Site::here()) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  using cuda_emulation::hopper::Major;
  cuda_emulation::hopper::wgmma("wgmma_m64n128k16", {dtype, 128, a, nullptr, b, Major::kColumns}, c,
                                add, site);
}

template <DType dtype, int registers>
void wgmma_rows_of_b(float (&c)[registers], const uint32_t (&a)[4], uint64_t b,
                     Site site = Site::here()) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  static_assert(registers == 32 || registers == 64);
  using cuda_emulation::hopper::Major;
  cuda_emulation::hopper::wgmma("wgmma_rows_of_b", {dtype, 2 * registers, 0, a, b, Major::kRows}, c,
                                true, site);
}

}  // namespace h2o_prefill::ptx
