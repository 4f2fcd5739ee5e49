// The feature map that linear attention applies to queries and keys.
#pragma once

#include <cstdint>

namespace h2o_prefill {

enum class FeatureMap : int32_t {
  kIdentity,
  kRelu,
  kEluPlusOne,  // x + 1 above 0, exp(x) elsewhere
};

}  // namespace h2o_prefill
