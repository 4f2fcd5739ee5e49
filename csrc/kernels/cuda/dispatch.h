// Choosing among the kernels that are compiled: by dtype, by the head dim that tiles are padded to,
// by the kind of keys. What has no kernel is cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "kernels/params.h"

namespace h2o_prefill {

template <DType dtype>
using DTypeConstant = std::integral_constant<DType, dtype>;

// Returns run(DTypeConstant) for the 16-bit dtypes, which have tensor cores.
template <typename Run>
cudaError_t with_half_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kBFloat16:
      return run(DTypeConstant<DType::kBFloat16>());
    case DType::kFloat16:
      return run(DTypeConstant<DType::kFloat16>());
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

// Returns run(std::integral_constant) of the first of kDims that has room for `dim` elements.
template <int... kDims, typename Run>
cudaError_t with_padded_dim(int64_t dim, const Run& run) {
  cudaError_t result = cudaErrorInvalidValue;
  const auto try_dim = [&](auto padded) {
    if (dim > padded()) return false;
    result = run(padded);
    return true;
  };
  (try_dim(std::integral_constant<int, kDims>()) || ...);
  return result;
}

// Returns run(std::bool_constant): whether keys are gathered.
template <typename Run>
cudaError_t with_kind(bool gathered, const Run& run) {
  return gathered ? run(std::true_type()) : run(std::false_type());
}

}  // namespace h2o_prefill
