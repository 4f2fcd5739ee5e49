// The integers of a pickled state: an int64 tensor in front of the other tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

namespace h2o_prefill {

// Reads tensors[0], int64 [fields + layers * layer_fields] with at least one layer. Throws if it is
// anything else.
inline std::vector<int64_t> read_header(const std::vector<at::Tensor>& tensors, int64_t fields,
                                        int64_t layer_fields) {
  TORCH_CHECK_VALUE(!tensors.empty(), "tensors must begin with an int64 header, got none");
  const at::Tensor& header = tensors[0];
  TORCH_CHECK_VALUE(
      header.defined() && header.dim() == 1 && header.scalar_type() == at::kLong &&
          header.size(0) >= fields + layer_fields && (header.size(0) - fields) % layer_fields == 0,
      "tensors must begin with an int64 header of ", fields, " fields and ", layer_fields,
      " per layer, got ", header.defined() ? header.sizes() : at::IntArrayRef(), " ",
      header.defined() ? header.scalar_type() : at::ScalarType::Undefined);
  const auto here = header.cpu().contiguous();
  const auto* first = here.const_data_ptr<int64_t>();
  return {first, first + here.numel()};
}

}  // namespace h2o_prefill
