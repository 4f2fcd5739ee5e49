// Functions that kernels of the host and of devices share.
#pragma once

#ifdef __CUDACC__
#define H2O_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Forced inline: these headers are compiled for several instruction sets, and no copy may serve
// another one's callers.
#define H2O_HOST_DEVICE inline __attribute__((always_inline))
#endif
