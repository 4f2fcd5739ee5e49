// Lists of positions on the host: how many entries they hold, and whether they may be followed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace h2o_prefill {

// Entries before the first -1 of every list of a contiguous int32 [B, Hkv, M]. Throws if a list
// goes on behind a -1 or names a position outside [0, length).
std::vector<int64_t> memory_counts(const at::Tensor& indices, int64_t length, const char* name);

}  // namespace h2o_prefill
