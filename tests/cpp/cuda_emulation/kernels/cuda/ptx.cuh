// Stands in for csrc/kernels/cuda/ptx.cuh: the same functions with the semantics of the PTX ISA.
// The fragments are written down here as the ISA has them, not taken from layout.h, which is tested
// against them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_emulation/counters.h"
#include "cuda_emulation/races.h"
#include "cuda_emulation/scheduler.h"
#include "kernels/cpu/float16.h"
#include "kernels/params.h"

namespace h2o_prefill::ptx {

using cuda_emulation::Site;

template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_emulation::shared_memory());
}

// Launches follow one another.
inline void wait_for_earlier_launches() {
  cuda_emulation::threads_that_waited.fetch_add(1, std::memory_order_relaxed);
}

inline uint32_t shared_address(const void* pointer) {
  return cuda_emulation::shared_address(pointer);
}

inline void cp_async_16(void* shared, const void* global, bool valid, Site site = Site::here()) {
  cuda_emulation::check_shared("cp_async_16", shared, 16, site);
  cuda_emulation::check_alignment("cp_async_16", global, 16, site);
  cuda_emulation::copies().begin(shared, valid ? global : nullptr, 16);
}

inline void cp_async_commit() { cuda_emulation::copies().commit(); }

template <int pending>
void cp_async_wait() {
  static_assert(pending >= 0);
  cuda_emulation::copies().wait(pending);
}

template <DType dtype>
float to_float(uint16_t x) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  return dtype == DType::kBFloat16 ? bfloat16_to_float(x) : float16_to_float(x);
}

template <DType dtype>
uint16_t from_float(float x) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  if (x != x) return 0x7FFF;  // the only NaN that the instruction gives
  return dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_float16(x);
}

template <DType dtype>
uint32_t pack_pair(float low, float high) {
  return from_float<dtype>(low) | static_cast<uint32_t>(from_float<dtype>(high)) << 16;
}

// The instructions flush subnormal numbers to zero of the same sign.
inline float flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x;
}
inline float exp2(float x) { return flush(std::exp2(flush(x))); }

struct MatrixLoad {
  uint32_t* r;
  const void* row;
};

// Not seen by ThreadSanitizer: it counts, and each lane has said what it reads.
template <bool kTransposed>
__attribute__((no_sanitize("thread"))) void load_matrices(void* const* arguments) {
  uint16_t matrix[8][8];
  for (int m = 0; m < 4; ++m) {
    unsigned int bank_groups = 0;
    for (int row = 0; row < 8; ++row) {
      const void* source = static_cast<MatrixLoad*>(arguments[8 * m + row])->row;
      std::memcpy(matrix[row], source, 16);
      bank_groups |= 1U << reinterpret_cast<uintptr_t>(source) / 16 % 8;
    }
    cuda_emulation::ldmatrix_conflicts += bank_groups != 0xFFU;
    for (int lane = 0; lane < cuda_emulation::kWarpSize; ++lane) {
      const int outer = lane / 4;
      const int inner = lane % 4 * 2;
      const uint32_t low = kTransposed ? matrix[inner][outer] : matrix[outer][inner];
      const uint32_t high = kTransposed ? matrix[inner + 1][outer] : matrix[outer][inner + 1];
      static_cast<MatrixLoad*>(arguments[lane])->r[m] = low | high << 16;
    }
  }
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
  cuda_emulation::check_shared("ldmatrix_x4", row, 16, site);
  cuda_emulation::races::read(row, 16);
  MatrixLoad load{r, row};
  cuda_emulation::warp_collective("ldmatrix_x4", &load, load_matrices<false>, site);
}

inline void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
  cuda_emulation::check_shared("ldmatrix_x4_transposed", row, 16, site);
  cuda_emulation::races::read(row, 16);
  MatrixLoad load{r, row};
  cuda_emulation::warp_collective("ldmatrix_x4_transposed", &load, load_matrices<true>, site);
}

struct Multiply {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// c += a b. Products are exact; the sum of 16 of them and of c is rounded once. The hardware's
// order and rounding of these sums are not documented.
//
// Not instrumented: all indices are constants, and the tests spend their time here.
__attribute__((no_sanitize("address", "undefined"))) inline void multiply_add(
    const double (&a)[16][16], const double (&b)[16][8], float (&c)[16][8]) {
  for (int row = 0; row < 16; ++row) {
    double sums[8];
    for (int column = 0; column < 8; ++column) sums[column] = c[row][column];
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
    }
    for (int column = 0; column < 8; ++column) c[row][column] = static_cast<float>(sums[column]);
  }
}

template <DType dtype>
void multiply(void* const* arguments) {
  double a[16][16];
  double b[16][8];
  float c[16][8];
  for (int lane = 0; lane < cuda_emulation::kWarpSize; ++lane) {
    const auto& mine = *static_cast<Multiply*>(arguments[lane]);
    const int group = lane >> 2;
    const int thread_in_group = lane & 3;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const int column = thread_in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[row][column] = to_float<dtype>(static_cast<uint16_t>(mine.a[i >> 1] >> 16 * (i & 1)));
    }
    for (int i = 0; i < 4; ++i) {
      const int row = thread_in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
      b[row][group] = to_float<dtype>(static_cast<uint16_t>(mine.b[i >> 1] >> 16 * (i & 1)));
      c[i < 2 ? group : group + 8][thread_in_group * 2 + (i & 1)] = mine.c[i];
    }
  }
  multiply_add(a, b, c);
  for (int lane = 0; lane < cuda_emulation::kWarpSize; ++lane) {
    auto& mine = *static_cast<Multiply*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) {
      mine.c[i] = c[i < 2 ? lane >> 2 : (lane >> 2) + 8][(lane & 3) * 2 + (i & 1)];
    }
  }
}

template <DType dtype>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  Site site = Site::here()) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  Multiply arguments{c, a, {b0, b1}};
  cuda_emulation::warp_collective("mma_m16n8k16", &arguments, multiply<dtype>, site);
}

}  // namespace h2o_prefill::ptx
