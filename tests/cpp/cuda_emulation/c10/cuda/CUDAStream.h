// What the CUDA operators use of c10::cuda, where the emulation is the device: tensors on the CPU
// are the device's, and there is one stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/library.h>

// What is registered for CUDA serves tensors on the CPU.
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, k, m) _TORCH_LIBRARY_IMPL(ns, CPU, m, C10_UID)

namespace c10::cuda {

class CUDAStream {
 public:
  operator cudaStream_t() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream() { return {}; }

}  // namespace c10::cuda
