// From which length of a prompt on sparse attention is faster than dense attention: what an open
// min_prefill is resolved to. No clock decides, but a table of costs by device
// (common/crossover.cpp) and the settings, so that every process decides alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"

namespace h2o_prefill {

// What sparse attention costs on a device.
struct H2O_API DeviceCost {
  std::string device = {};  // the CPU's instruction set, or the architecture of the CUDA kernels
  double sparse_product = 0.0;  // time of a query-key product in sparse attention, in dense ones
  bool measured = false;        // whether the table has device and dtype; else it is an upper bound
};

// The cost on a device with a dtype, and on the device of a tensor with its dtype.
H2O_API DeviceCost device_cost(const at::Device& device, at::ScalarType dtype);
inline DeviceCost device_cost(const at::Tensor& like) {
  return device_cost(like.device(), like.scalar_type());
}

// The length from which sparse attention is at least 5 % faster in a sparse layer: a multiple of
// chunk_size / 8, or kLargestSetting if there is none up to 1,024 chunks.
H2O_API int64_t shortest_sparse_prompt(const PrefillConfig& config, double sparse_product);

}  // namespace h2o_prefill
