// Functions that kernels of the host and of devices share.
#pragma once

#ifdef __CUDACC__
#define H2O_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Forced inline: these headers are compiled for several instruction sets, and no copy may serve
// another one's callers.
#define H2O_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace h2o_prefill {

template <typename Int>
H2O_HOST_DEVICE constexpr Int divide_up(Int n, Int by) {
  return (n + by - 1) / by;
}

template <typename Int>
H2O_HOST_DEVICE constexpr Int round_up(Int n, Int multiple) {
  return divide_up(n, multiple) * multiple;
}

}  // namespace h2o_prefill
