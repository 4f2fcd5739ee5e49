// Descriptions of tensors for kernels: pointers, sizes and strides, without PyTorch types.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace h2o_prefill {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

H2O_HOST_DEVICE constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Outputs of a panel of a packed linear layer.
constexpr int64_t kPanelOutputs = 16;

// A [B, H, T, D] tensor whose last dimension is contiguous. Strides are counted in elements.
struct HeadsView {
  void* data;
  DType dtype;
  int64_t batch;
  int64_t heads;
  int64_t length;
  int64_t dim;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;

  // First element of row t of head h of batch row b.
  void* row(int64_t b, int64_t h, int64_t t) const {
    return static_cast<char*>(data) +
           (b * stride_batch + h * stride_head + t * stride_row) * size_of(dtype);
  }

  // The same rows from the last one to the first. There must be one.
  HeadsView reversed() const {
    HeadsView view = *this;
    view.data = row(0, 0, length - 1);
    view.stride_row = -stride_row;
    return view;
  }
};

}  // namespace h2o_prefill
