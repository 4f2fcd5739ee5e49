#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "common/checks.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

// Rows prefetched before their copy: the hardware cannot predict their addresses.
constexpr int64_t kPrefetchRows = 8;

// Copies rows [begin, end) of one head's list. positions: checked; stride in bytes.
void copy_rows(const char* from, int64_t stride, const int32_t* positions, int64_t begin,
               int64_t end, int64_t row_bytes, char* to) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kPrefetchRows < end && positions[i + kPrefetchRows] >= 0) {
      const char* ahead = from + positions[i + kPrefetchRows] * stride;
      for (int64_t byte = 0; byte < row_bytes; byte += kCacheLine) __builtin_prefetch(ahead + byte);
    }
    char* row = to + i * row_bytes;
    if (positions[i] < 0) {
      std::memset(row, 0, row_bytes);
    } else {
      std::memcpy(row, from + positions[i] * stride, row_bytes);
    }
  }
}

at::Tensor gather_rows_cpu(const at::Tensor& x_argument, const at::Tensor& indices_argument) {
  check_gather_rows(x_argument, indices_argument);
  const auto x = with_contiguous_rows(x_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t heads = x.size(1);
  const int64_t count = indices.size(2);
  const int64_t size = x.element_size();
  const int64_t row_bytes = x.size(3) * size;
  auto y = at::empty({x.size(0), heads, count, x.size(3)}, x.options());
  const int32_t* positions = indices.const_data_ptr<int32_t>();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  // A task is a range of one head's rows, so that few long lists keep many cores busy.
  constexpr int64_t kTaskRows = 256;
  const int64_t tasks_of_head = divide_up(count, kTaskRows);
  at::parallel_for(0, x.size(0) * heads * tasks_of_head, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t head = task / tasks_of_head;
      const int64_t begin = task % tasks_of_head * kTaskRows;
      const char* head_from =
          from + (head / heads * x.stride(0) + head % heads * x.stride(1)) * size;
      copy_rows(head_from, x.stride(2) * size, positions + head * count, begin,
                std::min(begin + kTaskRows, count), row_bytes, to + head * count * row_bytes);
    }
  });
  return y;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("gather_rows", &gather_rows_cpu); }

}  // namespace
}  // namespace h2o_prefill
