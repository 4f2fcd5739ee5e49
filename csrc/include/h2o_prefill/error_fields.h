// The numbers of LayerState::errors for each KV head.
#pragma once

#include <cstdint>

namespace h2o_prefill {

// How often errors have doubled its L and H, the sum of its errors in the chunks where they were
// measured, the number of these chunks, and the sum of the factors, 2^doublings, that L and H had
// in them.
inline constexpr int64_t kDoublings = 0;
inline constexpr int64_t kErrorSum = 1;
inline constexpr int64_t kErrorCount = 2;
inline constexpr int64_t kFactorSum = 3;
inline constexpr int64_t kErrorFields = 4;

}  // namespace h2o_prefill
