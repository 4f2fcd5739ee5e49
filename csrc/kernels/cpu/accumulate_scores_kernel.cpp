#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

// Elements from one unit of [B, Hkv, T] to the next, where that is the same for all and positions
// are contiguous.
std::optional<int64_t> unit_stride(const at::Tensor& t) {
  if (t.size(2) > 1 && t.stride(2) != 1) return std::nullopt;
  if (t.size(1) == 1) return t.stride(0);
  if (t.size(0) > 1 && t.stride(0) != t.size(1) * t.stride(1)) return std::nullopt;
  return t.stride(1);
}

void accumulate_scores_cpu(at::Tensor& scores, const at::Tensor& memory_argument,
                           const at::Tensor& colsum_argument) {
  check_accumulate_scores(scores, memory_argument, colsum_argument);
  const auto stride = unit_stride(scores);
  if (scores.scalar_type() != at::kFloat || !stride) {
    return composite::accumulate_scores_(scores, memory_argument, colsum_argument);
  }
  const auto memory = memory_argument.contiguous();
  const auto colsum = colsum_argument.contiguous();
  add_to_scores({.positions = memory.const_data_ptr<int32_t>(), .width = memory.size(2)},
                memory.size(0) * memory.size(1), colsum.const_data_ptr<float>(),
                scores.mutable_data_ptr<float>(), *stride);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("accumulate_scores_", &accumulate_scores_cpu); }

}  // namespace
}  // namespace h2o_prefill
