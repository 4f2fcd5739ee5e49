// Stands in for PyTorch's header of this name: there is one device (see CUDAStream.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(Device device) { TORCH_INTERNAL_ASSERT(device.is_cpu()); }
};

}  // namespace c10::cuda
