#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"

namespace h2o_prefill {
namespace {

AttentionResult intra_chunk_attention_cpu(const AttentionArguments& arguments, int64_t chunk_size) {
  if (arguments.query.scalar_type() == at::kDouble) {
    return composite::intra_chunk_attention(arguments, chunk_size);
  }
  const AttentionArguments x = arguments.with_rows(&with_contiguous_rows);
  const int64_t length = x.length();
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::empty({x.key.size(0), x.key.size(1), length}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  const AttentionCall call(x, out, lse.mutable_data_ptr<float>());
  const int64_t largest = std::min(chunk_size, length);
  Workspace workspace;
  AttendChunk attend(call, {.rows = largest, .keys = {largest, 0}}, workspace);
  workspace.allocate();
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    const RowRange rows{.begin = begin, .count = std::min(chunk_size, length - begin), .past = 0};
    const ColumnSums sums{.data = colsum.mutable_data_ptr<float>() + begin, .stride = length};
    attend.run(call, rows, {{own_keys(rows), sums}});
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_entry<&intra_chunk_attention_cpu>);
}

}  // namespace
}  // namespace h2o_prefill
