// The head dims that kernels of sm_90a take.
#pragma once

#include <cstdint>

namespace h2o_prefill {

// Whether keys or values of `dim` elements are padded to 64 or 128, the rows of these kernels,
// without waste.
constexpr bool has_rows_of_sm90(int64_t dim) { return dim <= 64 || (dim > 96 && dim <= 128); }

}  // namespace h2o_prefill
