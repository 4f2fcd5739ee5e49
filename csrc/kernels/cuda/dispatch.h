// Choosing among the kernels that are compiled: by dtype, by the head dim that tiles are padded to,
// by the kind of keys. cudaErrorInvalidValue: there is no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "kernels/params.h"

namespace h2o_prefill {

template <DType dtype>
using DTypeConstant = std::integral_constant<DType, dtype>;

// Returns visit(DTypeConstant) for the 16-bit dtypes, which have tensor cores.
template <typename Visitor>
cudaError_t with_half_dtype(DType dtype, const Visitor& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(DTypeConstant<DType::kBFloat16>());
    case DType::kFloat16:
      return visit(DTypeConstant<DType::kFloat16>());
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

// Returns visit(std::integral_constant) of the first of kDims that has room for `dim` elements.
template <int... kDims, typename Visitor>
cudaError_t with_padded_dim(int64_t dim, const Visitor& visit) {
  cudaError_t result = cudaErrorInvalidValue;
  const auto try_dim = [&](auto padded) {
    if (dim > padded()) return false;
    result = visit(padded);
    return true;
  };
  (try_dim(std::integral_constant<int, kDims>()) || ...);
  return result;
}

// Returns visit(std::bool_constant): whether keys are gathered.
template <typename Visitor>
cudaError_t with_kind(bool gathered, const Visitor& visit) {
  return gathered ? visit(std::true_type()) : visit(std::false_type());
}

}  // namespace h2o_prefill
