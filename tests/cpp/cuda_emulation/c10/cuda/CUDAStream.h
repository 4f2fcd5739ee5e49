// The parts of c10::cuda that the CUDA operators use, where the emulation is the device: tensors on
// the CPU are the device's, and there is one stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/library.h>

// Operators for CUDA serve tensors on the CPU.
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, k, m) _TORCH_LIBRARY_IMPL(ns, CPU, m, C10_UID)

namespace c10::cuda {

class CUDAStream {
 public:
  operator cudaStream_t() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream() { return {}; }

}  // namespace c10::cuda
