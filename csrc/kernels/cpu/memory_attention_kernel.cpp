#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

AttentionResult memory_attention_cpu(const AttentionArguments& arguments,
                                     const at::Tensor& indices_argument) {
  if (arguments.query.scalar_type() == at::kDouble) {
    return composite::memory_attention(arguments, indices_argument);
  }
  const AttentionArguments x = arguments.with_rows(&with_contiguous_rows);
  const auto indices = indices_argument.contiguous();
  const int64_t length = x.length();
  const int64_t width = indices.size(2);
  const int64_t units = x.key.size(0) * x.key.size(1);
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::zeros({x.key.size(0), x.key.size(1), width}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  MemorySetView sets{.positions = indices.const_data_ptr<int32_t>(), .width = width};
  std::vector<int64_t> counts(units);
  count_members(sets, units, counts.data());
  sets.counts = counts.data();
  const AttentionCall call(x, out, lse.mutable_data_ptr<float>());
  Workspace workspace;
  const int64_t most_keys = *std::max_element(counts.begin(), counts.end());
  AttendChunk attend(call, {.rows = length, .keys = {most_keys, 0}}, workspace);
  workspace.allocate();
  const ColumnSums sums{.data = colsum.mutable_data_ptr<float>(), .stride = width};
  attend.run(call, {.begin = 0, .count = length, .past = x.past()}, {{sets, sums}});
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("memory_attention", &memory_attention_entry<&memory_attention_cpu>);
}

}  // namespace
}  // namespace h2o_prefill
