#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "common/prefill_entries.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/chunk_end.h"
#include "kernels/cuda/dense_attention.h"

namespace h2o_prefill {
namespace {

// The memory sets of a request from chunk to chunk. What a chunk leaves to be done goes into the
// launch that selects the next sets, or into end().
class MemorySets {
 public:
  explicit MemorySets(const PrefillRequest& request)
      : request_(request),
        next_(at::empty({request.key.size(0), request.key.size(1), request.settings.memory_size()},
                        request.query.options().dtype(at::kInt))),
        spare_(at::empty_like(next_)),
        end_{.units = request.units()} {
    if (request.start.defined() && request.past() > 0) sets_ = request.start.contiguous();
  }

  void leave(const column_sums::Grid& sums) { end_.sums = sums; }
  void leave(const RecordErrorsParams& errors) { end_.errors = errors; }

  void end() {
    C10_CUDA_CHECK(launch_chunk_end(end_, c10::cuda::getCurrentCUDAStream()));
    end_ = {.units = request_.units()};
  }

  // Selects the sets for the chunk that begins at a row of the call.
  void select(int64_t chunk_begin, int64_t row) {
    const int64_t chunk_end = request_.past() + row;
    end_.select = {
        .from = {.positions = sets_.defined() ? sets_.const_data_ptr<int32_t>() : nullptr,
                 .width = sets_.defined() ? sets_.size(2) : 0},
        .scores = request_.scores.const_data_ptr<float>(),
        .scores_stride = request_.scores.size(2),
        .scores_length = chunk_end,
        .chunk_begin = chunk_begin,
        .chunk_end = chunk_end,
        .budget = request_.budget(),
        .errors = request_.errors.defined() ? request_.errors.const_data_ptr<float>() : nullptr,
        .widening = request_.widening(),
        .selected = next_.mutable_data_ptr<int32_t>(),
        .width = next_.size(2)};
    end();
    sets_ = std::exchange(next_, std::move(spare_));
    spare_ = sets_;
    request_.keep_checkpoint(row, [&](const at::Tensor& memory) { memory.copy_(sets_); });
  }

  MemorySetView view() const {
    return {.positions = sets_.const_data_ptr<int32_t>(), .width = sets_.size(2)};
  }

  // Writes the sets of the last select() to the request's memory.
  void finish() const {
    const int64_t width = sets_.size(2);
    const int64_t room = request_.memory.size(2);
    request_.memory.narrow(2, 0, width).copy_(sets_);
    if (room > width) request_.memory.narrow(2, width, room - width).fill_(-1);
  }

 private:
  const PrefillRequest& request_;
  at::Tensor sets_;
  at::Tensor next_;
  at::Tensor spare_;
  ChunkEndParams end_;
};

// Exact attention of the rows in which a request measures errors. It depends on no selection, so
// all rows are computed at once, before the first chunk.
class ExactRows {
 public:
  ExactRows(const PrefillRequest& request, AttentionArguments x)
      : request_(request), measured_(request.measured_rows()) {
    const at::Tensor& q = x.query;
    const int64_t heads = q.size(1);
    const auto ints = q.options().dtype(at::kInt);
    const auto rows = at::empty({q.size(0), heads, measured_.size()}, ints);
    const int64_t room = round_up(measured_.size(), kLimitRows);
    const auto limits = at::empty({room}, ints);
    const ListMeasuredParams list{.measured = measured_,
                                  .heads = q.size(0) * heads,
                                  .rows = rows.mutable_data_ptr<int32_t>(),
                                  .limits = limits.mutable_data_ptr<int32_t>(),
                                  .room = room};
    C10_CUDA_CHECK(launch_list_measured(list, c10::cuda::getCurrentCUDAStream()));
    x.query = gather_rows(q, rows);
    // Larger parts than of a dense call: rows at the begin of a prompt see no key of most.
    exact_ = attend_in_parts(x, limits, parts_of_keys(x, /*least_keys=*/2048));
  }

  // To record the errors of the chunk with these rows, whose output is final.
  RecordErrorsParams errors(const AttendForwardParams& call, const RowRange& rows) const {
    return {.out = call.out,
            .exact = heads_view(exact_),
            .measured = measured_,
            .chunk = rows.begin / measured_.chunk_size,
            .kv_heads = call.key.heads,
            .widening = request_.widening(),
            .errors = request_.errors.mutable_data_ptr<float>()};
  }

 private:
  const PrefillRequest& request_;
  MeasuredRows measured_;
  at::Tensor exact_;
};

at::Tensor chunked_sparse_attention_cuda(const PrefillRequest& request) {
  if (!has_attention_kernel(request)) return composite::chunked_sparse_attention(request);
  const c10::cuda::CUDAGuard guard(request.query.device());
  const AttentionArguments x = request.with_rows(&with_aligned_rows);
  auto out = x.empty_out();
  const auto lse = x.empty_lse();
  const AttendForwardParams call = attention_call(x, out, lse);
  AttentionStream stream(out);
  float* const scores = request.scores.mutable_data_ptr<float>();
  const int64_t scores_stride = request.scores.size(2);

  // Phase 1: all chunks at once.
  const AttendForwardParams phase1 = chunk_pass(call, request.settings.chunk_size);
  stream.attend(phase1);
  ColumnSumsParams sums = column_sums_pass(phase1, call.lse, scores, scores_stride);
  sums.reduce_max = request.reduce_max();
  stream.sum_columns(sums);

  // Phase 2: chunk after chunk, each from the scores that the ones before it left.
  int64_t previous_begin = request.last_chunk_begin;
  std::optional<MemorySets> sets;
  std::optional<ExactRows> exact;  // which the end of the last chunk reads
  if (request.selects() || request.ends_at_checkpoint()) sets.emplace(request);
  if (request.selects()) {
    const RecallLists lists = converted(request.recall, [&](const at::Tensor& list) {
      return list.to(out.device(), list.scalar_type(), /*non_blocking=*/true).contiguous();
    });
    const RecallView recall = request.recall_view(lists);
    const auto memory_lse = at::empty_like(lse);
    float* const of_memory = memory_lse.mutable_data_ptr<float>();
    if (request.settings.error_rows > 0) exact.emplace(request, x);
    for_each_chunk(request, [&](const RowRange& rows) {
      if (rows.position() > 0) {
        sets->select(previous_begin, rows.begin);
        auto phase2 = memory_pass(call, rows, sets->view());
        phase2.recall = recall;
        phase2.memory_lse = of_memory;
        phase2.merge_with_out = true;
        stream.attend(phase2);
        sums = column_sums_pass(phase2, of_memory, scores, scores_stride);
        sums.scatter_add = true;
        sums.usual_width = request.budget().width();
        sums.reduce_max = request.reduce_max();
        sets->leave(stream.sum_columns(sums));
        if (exact) sets->leave(exact->errors(call, rows));
      }
      previous_begin = rows.position();
    });
    sets->finish();
  } else {
    request.memory.fill_(-1);
  }

  if (request.ends_at_checkpoint()) {
    sets->select(previous_begin, x.length());
  } else if (sets) {
    sets->end();
  }
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunked_sparse_attention",
         &chunked_sparse_attention_entry<chunked_sparse_attention_cuda, dense_attention_cuda>);
  m.impl("prefill_attention_",
         &prefill_attention_entry<chunked_sparse_attention_cuda, dense_attention_cuda,
                                  sliding_window_attention_cuda>);
  m.impl("paged_sparse_attention_",
         &paged_sparse_attention_entry<chunked_sparse_attention_cuda, dense_attention_cuda,
                                       gather_pages_cuda>);
}

}  // namespace
}  // namespace h2o_prefill
