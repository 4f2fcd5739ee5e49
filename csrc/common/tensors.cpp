#include "common/tensors.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace h2o_prefill {

at::ScalarType accumulate_type(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

HeadsView heads_view(const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_INTERNAL_ASSERT(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
  const DType dtype = type == at::kFloat
                          ? DType::kFloat32
                          : (type == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat16);
  return {t.data_ptr(), dtype,       t.size(0),   t.size(1),  t.size(2),
          t.size(3),    t.stride(0), t.stride(1), t.stride(2)};
}

at::Tensor empty_heads(int64_t batch, int64_t heads, int64_t length, int64_t dim,
                       const at::Tensor& like) {
  return at::empty({batch, length, heads, dim}, like.options()).transpose(1, 2);
}

}  // namespace h2o_prefill
