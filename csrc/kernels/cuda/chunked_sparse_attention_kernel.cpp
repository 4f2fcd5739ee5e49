#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "common/prefill_entries.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/error_rows.h"
#include "kernels/cuda/select_memory.h"
#include "kernels/cuda/side_streams.h"

namespace h2o_prefill {
namespace {

// The memory sets of a request from chunk to chunk.
class MemorySets {
 public:
  // first_head: of the layer's heads, the first one that the request has.
  MemorySets(const PrefillRequest& request, int64_t first_head)
      : request_(request),
        next_(at::empty({request.key.size(0), request.key.size(1), request.settings.memory_size()},
                        request.query.options().dtype(at::kInt))),
        spare_(at::empty_like(next_)) {
    if (!request.settings.wide_heads.empty()) {
      by_head_ = at::ones({request.key.size(1)}, next_.options());
      for (int64_t head = 0; head < by_head_.size(0); ++head) {
        by_head_.narrow(0, head, 1).fill_(request.settings.factor_of_head(first_head + head));
      }
    }
    if (request.start.defined() && request.past() > 0) sets_ = request.start.contiguous();
  }

  // Selects the sets for the chunk that begins at chunk_end.
  void select(int64_t chunk_begin, int64_t chunk_end) {
    const SelectMemoryParams params{
        .units = request_.units(),
        .from = {.positions = sets_.defined() ? sets_.const_data_ptr<int32_t>() : nullptr,
                 .width = sets_.defined() ? sets_.size(2) : 0},
        .scores = request_.scores.const_data_ptr<float>(),
        .scores_stride = request_.scores.size(2),
        .scores_length = chunk_end,
        .chunk_begin = chunk_begin,
        .chunk_end = chunk_end,
        .budget = request_.budget(),
        .factors = by_head_.defined() ? by_head_.const_data_ptr<int32_t>() : nullptr,
        .heads = request_.key.size(1),
        .errors = request_.errors.defined() ? request_.errors.const_data_ptr<float>() : nullptr,
        .widening = request_.widening(),
        .selected = next_.mutable_data_ptr<int32_t>(),
        .width = next_.size(2)};
    C10_CUDA_CHECK(launch_select_memory(params, c10::cuda::getCurrentCUDAStream()));
    sets_ = std::exchange(next_, std::move(spare_));
    spare_ = sets_;
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
  at::Tensor by_head_;  // [Hkv], factors of L and H in the settings; undefined: 1
};

// Exact attention of the rows in which a request measures errors. It depends on no selection, so
// all rows are computed at once, before the first chunk.
class ExactRows {
 public:
  ExactRows(const PrefillRequest& request, const AttentionCall& call, const at::Tensor& q,
            const AttentionStream& stream)
      : request_(request), measured_(request.measured_rows()) {
    const int64_t heads = q.size(1);
    const auto ints = q.options().dtype(at::kInt);
    const auto rows = at::empty({q.size(0), heads, measured_.size()}, ints);
    const auto limits = at::empty({measured_.size()}, ints);
    const ListMeasuredParams list{.measured = measured_,
                                  .heads = q.size(0) * heads,
                                  .rows = rows.mutable_data_ptr<int32_t>(),
                                  .limits = limits.mutable_data_ptr<int32_t>()};
    C10_CUDA_CHECK(launch_list_measured(list, c10::cuda::getCurrentCUDAStream()));
    const auto queries = gather_rows(q, rows);
    exact_ = empty_heads(q.size(0), heads, measured_.size(), request.value.size(3), q);
    AttentionCall measured = call;
    measured.query = heads_view(queries);
    measured.out = heads_view(exact_);
    measured.lse = nullptr;
    stream.attend(limited_pass(measured, limits.const_data_ptr<int32_t>()));
  }

  // Records the errors of the chunk with these rows, of which the output is final.
  void record(const AttentionCall& call, const RowRange& rows) const {
    const RecordErrorsParams params{.out = call.out,
                                    .exact = heads_view(exact_),
                                    .measured = measured_,
                                    .chunk = rows.begin / measured_.chunk_size,
                                    .kv_heads = call.key.heads,
                                    .widening = request_.widening(),
                                    .errors = request_.errors.mutable_data_ptr<float>()};
    C10_CUDA_CHECK(launch_record_errors(params, c10::cuda::getCurrentCUDAStream()));
  }

 private:
  const PrefillRequest& request_;
  MeasuredRows measured_;
  at::Tensor exact_;
};

// The lists where the kernels read them.
RecallLists on_device(const RecallLists& lists, const at::Tensor& q) {
  if (!lists.offsets.defined()) return {};
  const auto bring = [&](const at::Tensor& list) {
    return list.to(q.device(), list.scalar_type(), /*non_blocking=*/true).contiguous();
  };
  return {.offsets = bring(lists.offsets),
          .positions = bring(lists.positions),
          .visible_from = bring(lists.visible_from)};
}

// What a call is computed from, with aligned rows, and what is computed.
struct CallTensors {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor out;
  at::Tensor lse;  // [B, Hq, T]
};

// Batch rows, or KV heads of one batch row with their query heads: states of these lie in one
// piece.
struct Part {
  int64_t dim;
  int64_t begin;
  int64_t count;

  // t: [B, Hkv, ...] or, with `group` heads for each of them, [B, Hq, ...].
  at::Tensor of(const at::Tensor& t, int64_t group = 1) const {
    if (!t.defined()) return t;
    const int64_t scale = dim == 0 ? 1 : group;
    return t.narrow(dim, begin * scale, count * scale);
  }
};

// Phase 2 of a part: launches that wait for one another, chunk after chunk, each selection from the
// scores that the chunks before it left.
class Phase2 {
 public:
  Phase2(const PrefillRequest& request, const CallTensors& tensors, const RecallLists& lists,
         const Part& part)
      : request_(part_of(request, part)),
        lists_(lists),
        group_(tensors.query.size(1) / tensors.key.size(1)),
        query_(part.of(tensors.query, group_)),
        lse_(part.of(tensors.lse, group_)),
        memory_lse_(at::empty_like(lse_)),
        call_(query_, part.of(tensors.key), part.of(tensors.value), part.of(tensors.out, group_),
              lse_, request.scale()),
        stream_(query_),
        sets_(request_, part.dim == 1 ? part.begin : 0),
        previous_begin_(request.last_chunk_begin) {
    recall_ = request_.recall_view(lists_);
    if (recall_.offsets && part.dim == 0) recall_.offsets += part.begin * recall_.blocks;
    if (request_.settings.error_rows > 0) exact_.emplace(request_, call_, query_, stream_);
  }

  void attend(const RowRange& rows) {
    if (const int64_t begin = rows.position(); begin > 0) {
      sets_.select(previous_begin_, begin);
      float* const of_memory = memory_lse_.mutable_data_ptr<float>();
      const auto pass = merged_memory_pass(call_, rows, sets_.view(), recall_, of_memory);
      stream_.attend(pass);
      auto sums = added_memory_sums(pass, of_memory, request_.scores.mutable_data_ptr<float>(),
                                    request_.scores.size(2));
      sums.reduce_max = request_.reduce_max();
      stream_.sum_columns(sums);
      if (exact_) exact_->record(call_, rows);
    }
    previous_begin_ = rows.position();
  }

  // Writes the sets of the last chunk to the request's memory.
  void finish() const { sets_.finish(); }

 private:
  static PrefillRequest part_of(PrefillRequest request, const Part& part) {
    const int64_t group = request.query.size(1) / request.key.size(1);
    request.query = part.of(request.query, group);
    for (at::Tensor* t : {&request.key, &request.value, &request.scores, &request.start,
                          &request.memory, &request.errors}) {
      *t = part.of(*t);
    }
    return request;
  }

  PrefillRequest request_;
  RecallLists lists_;
  RecallView recall_;
  int64_t group_;
  at::Tensor query_;
  at::Tensor lse_;
  at::Tensor memory_lse_;
  AttentionCall call_;
  AttentionStream stream_;
  MemorySets sets_;
  std::optional<ExactRows> exact_;
  int64_t previous_begin_;
};

// In how many parts phase 2 is computed, side by side: while one part waits for a selection or the
// end of a launch, the other has the GPU. A chunk that does not fill it is launched faster in one.
int64_t count_parts(const PrefillRequest& request) {
  constexpr int64_t kTileRows = 128;
  int device = 0, multiprocessors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int64_t rows = request.query.size(0) * request.query.size(1) * request.largest_chunk();
  return request.units() > 1 && rows > multiprocessors * kTileRows ? 2 : 1;
}

void attend_to_memory(const PrefillRequest& request, const CallTensors& tensors) {
  const RecallLists lists = on_device(request.recall, tensors.query);
  const int64_t dim = tensors.key.size(0) > 1 ? 0 : 1;
  const int64_t size = tensors.key.size(dim);
  const int64_t parts = count_parts(request);
  SideStreams streams(parts - 1);
  std::vector<Phase2> chains;
  chains.reserve(parts);
  const auto for_each_part = [&](const auto& with) {
    for (int64_t i = 0; i < parts; ++i) {
      const auto guard = streams.use(i);
      with(i);
    }
  };
  for_each_part([&](int64_t i) {
    const int64_t begin = size * i / parts;
    chains.emplace_back(request, tensors, lists,
                        Part{.dim = dim, .begin = begin, .count = size * (i + 1) / parts - begin});
  });
  for_each_chunk(request, [&](const RowRange& rows) {
    for_each_part([&](int64_t i) { chains[i].attend(rows); });
  });
  for_each_part([&](int64_t i) { chains[i].finish(); });
  streams.join();
}

at::Tensor chunked_sparse_attention_cuda(const PrefillRequest& request) {
  if (!has_attention_kernel(request.query, request.value) ||
      !has_attention_kernel(request.sinks, request.softcap)) {
    return composite::chunked_sparse_attention(request);
  }
  const c10::cuda::CUDAGuard guard(request.query.device());
  const auto q = with_aligned_rows(request.query);
  const auto k = with_aligned_rows(request.key);
  const auto v = with_aligned_rows(request.value);
  const int64_t length = request.length();
  const int64_t chunk_size = request.settings.chunk_size;
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  const auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  const AttentionCall call(q, k, v, out, lse, request.scale());
  AttentionStream stream(q);
  float* const scores = request.scores.mutable_data_ptr<float>();
  const int64_t scores_stride = request.scores.size(2);

  // Phase 1: all chunks at once.
  const AttendForwardParams phase1 = chunk_pass(call, call.rows(), chunk_size);
  stream.attend(phase1);
  ColumnSumsParams sums = chunk_sums(phase1, scores, scores_stride);
  sums.reduce_max = request.reduce_max();
  stream.sum_columns(sums);

  if (request.selects()) {
    attend_to_memory(request, {.query = q, .key = k, .value = v, .out = out, .lse = lse});
  } else {
    request.memory.fill_(-1);
  }

  if (const int64_t tail = request.tail(); tail > 0) {
    auto dense = dense_pass(call, {.begin = length - tail, .count = tail, .past = request.past()});
    dense.lse = nullptr;
    stream.attend(dense);
  }
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunked_sparse_attention",
         &chunked_sparse_attention_entry<chunked_sparse_attention_cuda, dense_attention_cuda>);
  m.impl("prefill_attention",
         &prefill_attention_entry<chunked_sparse_attention_cuda, dense_attention_cuda>);
  m.impl("prefill_attention_",
         &prefill_attention_in_place_entry<chunked_sparse_attention_cuda, dense_attention_cuda,
                                           sliding_window_attention_cuda>);
}

}  // namespace
}  // namespace h2o_prefill
