// Are products of bfloat16 faster here? Some CPUs run them at twice the speed of float32, some
// slower, and the feature bits do not say which.
#pragma once

#include <vector>

#include "kernels/cpu/attend_rows.h"

namespace h2o_prefill {

// Measures attention with bfloat16 inputs, for well under a millisecond: the fastest of
// `with_products` where it clearly beats `without`, the set of kernels that computes in float32.
CpuKernels fastest_in_bfloat16(const CpuKernels& without,
                               const std::vector<CpuKernels>& with_products);

}  // namespace h2o_prefill
