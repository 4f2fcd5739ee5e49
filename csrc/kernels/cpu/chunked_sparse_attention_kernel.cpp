#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "common/prefill_entries.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/dense_attention.h"
#include "kernels/cpu/error_rows.h"
#include "kernels/cpu/memory_set_updater.h"

namespace h2o_prefill {
namespace {

at::Tensor chunked_sparse_attention_cpu(const PrefillRequest& request) {
  if (request.query.scalar_type() == at::kDouble) {
    return composite::chunked_sparse_attention(request);
  }
  const AttentionArguments x = request.with_rows(&with_contiguous_rows);
  const RecallLists recall =
      converted(request.recall, [](const at::Tensor& list) { return list.contiguous(); });
  const int64_t length = request.length();
  auto out = x.empty_out();

  Workspace workspace;
  std::optional<MemorySetUpdater> updater;
  if (request.selects() || request.num_checkpoints() > 0) updater.emplace(request, workspace);
  AttentionCall call(x, out, /*lse=*/nullptr);
  call.reduce_max = request.reduce_max();
  call.recall = request.recall_view(recall);
  const int64_t largest = request.largest_chunk();
  const int64_t members = updater ? updater->max_members() : 0;
  AttendChunk attend(call, {.rows = largest, .keys = {largest, members}}, workspace);
  std::optional<ErrorRows> errors;
  if (request.selects() && request.settings.error_rows > 0) errors.emplace(request, workspace);
  const auto lse = workspace.add<float>(call.query.batch * call.query.heads * length);
  workspace.allocate();
  call.lse = workspace.get(lse);

  const int64_t scores_stride = request.scores.size(2);
  float* const scores = request.scores.mutable_data_ptr<float>();
  int64_t previous_begin = request.last_chunk_begin;
  if (errors) errors->attend(call);
  const auto select = [&](int64_t row) {
    updater->select(previous_begin, request.past() + row);
    request.keep_checkpoint(row, [&](const at::Tensor& sets) { updater->write_sets(sets); });
  };
  for_each_chunk(request, [&](const RowRange& rows) {
    const int64_t begin = rows.position();
    const ColumnSums chunk_sums{.data = scores + begin, .stride = scores_stride};
    if (begin == 0) {
      attend.run(call, rows, {{own_keys(rows), chunk_sums}});
    } else {
      select(rows.begin);
      attend.run(call, rows, {{own_keys(rows), chunk_sums}, {updater->sets(), updater->sums()}});
      updater->accumulate();
      if (errors) errors->measure(call, rows);
    }
    previous_begin = begin;
  });
  if (request.selects()) {
    updater->write_sets(request.memory);
  } else {
    std::fill_n(request.memory.mutable_data_ptr<int32_t>(), request.memory.numel(), -1);
  }
  if (request.ends_at_checkpoint()) select(length);
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunked_sparse_attention",
         &chunked_sparse_attention_entry<chunked_sparse_attention_cpu, dense_attention_cpu>);
  m.impl("prefill_attention_",
         &prefill_attention_entry<chunked_sparse_attention_cpu, dense_attention_cpu,
                                  sliding_window_attention_cpu>);
  m.impl("paged_sparse_attention_",
         &paged_sparse_attention_entry<chunked_sparse_attention_cpu, dense_attention_cpu,
                                       composite::gather_pages>);
}

}  // namespace
}  // namespace h2o_prefill
