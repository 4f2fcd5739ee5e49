// Checks that tensors which an operator writes in place share memory neither with themselves nor
// with other arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace h2o_prefill {

struct NamedTensor {
  const char* name;
  const at::Tensor& tensor;
};

// Throws c10::ValueError that names the tensor if two of its elements lie at the same address, as
// in an expanded one.
void check_no_internal_overlap(const NamedTensor& written);

// Throws c10::ValueError that names both if a byte of `written` belongs to one of `others` too.
// Views of one buffer that share no byte pass, in whatever way they interleave.
void check_no_overlap(const NamedTensor& written, std::initializer_list<NamedTensor> others);

}  // namespace h2o_prefill
