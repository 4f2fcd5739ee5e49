#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>

#include "common/checks.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

at::Tensor gather_rows_cpu(const at::Tensor& x_argument, const at::Tensor& indices_argument) {
  check_gather_rows(x_argument, indices_argument);
  const auto x = with_contiguous_rows(x_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t heads = x.size(1);
  const int64_t count = indices.size(2);
  const int64_t row_bytes = x.size(3) * x.element_size();
  auto y = at::empty({x.size(0), heads, count, x.size(3)}, x.options());
  const int32_t* positions = indices.const_data_ptr<int32_t>();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  at::parallel_for(0, x.size(0) * heads * count, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / count;
      const int64_t position = positions[i];
      TORCH_CHECK_VALUE(position >= -1 && position < x.size(2), "indices must be -1 or in [0, ",
                        x.size(2), "), got ", position);
      if (position < 0) {
        std::memset(to + i * row_bytes, 0, row_bytes);
        continue;
      }
      const int64_t offset =
          head / heads * x.stride(0) + head % heads * x.stride(1) + position * x.stride(2);
      std::memcpy(to + i * row_bytes, from + offset * x.element_size(), row_bytes);
    }
  });
  return y;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("gather_rows", &gather_rows_cpu); }

}  // namespace
}  // namespace h2o_prefill
