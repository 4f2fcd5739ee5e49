// The parts of the CUDA runtime that the kernels' launchers use. Everything has happened when a
// call returns.
#pragma once

#include <cstddef>

#include "cuda_emulation/scheduler.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
};

using cudaStream_t = struct CUstream_st*;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
};

struct cudaFuncAttributes {
  int numRegs;
};

// The device has the instructions of sm_90a.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// Few multiprocessors, so that blocks which take one tile after another have several.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 3
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : 0;
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  attributes->numRegs = 168;
  return cudaSuccess;
}
