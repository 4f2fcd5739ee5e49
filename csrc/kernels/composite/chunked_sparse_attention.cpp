#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/memory_sets.h"
#include "common/prefill_entries.h"
#include "common/tensors.h"
#include "h2o_prefill/ops.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {
namespace {

// The keys that the rows of a chunk recall, and attention to them.
struct Recall {
  const PrefillRequest& request;
  at::Tensor offsets;  // on the host
  at::Tensor positions;
  at::Tensor visible_from;

  explicit Recall(const PrefillRequest& request) : request(request) {
    if (!request.recalls()) return;
    offsets = request.recall.offsets.cpu();
    positions = request.recall.positions.to(request.query.device());
    visible_from = request.recall.visible_from.to(request.query.device());
  }

  // rows: a chunk. sets: int32 [B, Hkv, M].
  Attended attend_chunk(const at::Tensor& sets, const RowRange& rows) const {
    const int64_t block = request.settings.recall_block(), end = rows.begin + rows.count;
    std::vector<at::Tensor> outs_of_batch, lses_of_batch;
    for (int64_t b = 0; b < request.query.size(0); ++b) {
      std::vector<at::Tensor> outs, lses;
      for (int64_t row = rows.begin; row < end; row += block) {
        const auto attended = attend_block(b, sets[b], rows.begin, row, std::min(block, end - row));
        outs.push_back(attended.out);
        lses.push_back(attended.lse);
      }
      outs_of_batch.push_back(at::cat(outs, 2));
      lses_of_batch.push_back(at::cat(lses, 2));
    }
    return {at::cat(outs_of_batch, 0), at::cat(lses_of_batch, 0), {}};
  }

 private:
  Attended attend_block(int64_t b, const at::Tensor& sets, int64_t first_row, int64_t row,
                        int64_t rows) const {
    const int64_t list = b * request.recall_blocks() + row / request.settings.recall_block();
    const int64_t from = offsets[list].item<int>();
    const int64_t count = offsets[list + 1].item<int>() - from;
    const int64_t heads = request.key.size(1);
    const auto keys = positions.narrow(0, from, count);
    const auto row_positions =
        at::arange(request.past() + row, request.past() + row + rows, keys.options());
    const auto held = (sets.unsqueeze(-1) == keys).any(1);  // [Hkv, count]
    const auto visible = (visible_from.narrow(0, from, count) <= row_positions.unsqueeze(-1))
                             .logical_and(keys < request.past() + first_row)
                             .expand({1, heads, 1, rows, count})
                             .logical_and(held.logical_not().view({1, heads, 1, 1, count}));
    const auto index = keys.to(at::kLong);
    const auto select = [&](const at::Tensor& t) {
      return t.narrow(0, b, 1).index_select(2, index);
    };
    return attend(request.query.narrow(0, b, 1).narrow(2, row, rows), select(request.key),
                  select(request.value), visible, request.scale(), {.softcap = request.softcap});
  }
};

}  // namespace

// Chunk by chunk: the memory set from the scores so far, phase 1 and phase 2 of the chunk, the
// scores they give.
at::Tensor chunked_sparse_attention(const PrefillRequest& request) {
  const at::Tensor& q = request.query;
  const at::Tensor& k = request.key;
  const at::Tensor& v = request.value;
  const int64_t length = request.length();
  const int64_t past = request.past();
  auto out = request.empty_out();
  auto sets = request.start.defined() && past > 0
                  ? request.start.narrow(2, 0, std::min(request.start.size(2), past))
                        .clone(at::MemoryFormat::Contiguous)
                  : at::full({k.size(0), k.size(1), 0}, -1, q.options().dtype(at::kInt));
  const Recall recall(request);
  const LogitOptions options{
      .sinks = request.sinks, .softcap = request.softcap, .reduce_max = request.reduce_max()};

  int64_t previous_begin = request.last_chunk_begin;
  const auto select = [&](int64_t row) {
    sets = select_sets(request.scores, sets, previous_begin, past + row, request.budget(),
                       request.factors(), request.most_members());
    request.keep_checkpoint(row, [&](const at::Tensor& memory) {
      memory.fill_(-1).narrow(2, 0, sets.size(2)).copy_(sets);
    });
  };
  for_each_chunk(request, [&](const RowRange& rows) {
    const int64_t begin = rows.position(), count = rows.count;
    const auto queries = q.narrow(2, rows.begin, count);
    auto attended = attend(queries, k.narrow(2, begin, count), v.narrow(2, begin, count),
                           causal_mask(count, q), request.scale(), options);
    request.scores.narrow(2, begin, count).copy_(attended.colsum);
    if (begin > 0) {
      select(rows.begin);
      const auto present = sets >= 0;
      const auto remembered =
          attend(queries, h2o_prefill::gather_rows(k, sets), h2o_prefill::gather_rows(v, sets),
                 present.unsqueeze(2).unsqueeze(2), request.scale(), options);
      auto scores = request.scores;
      composite::accumulate_scores_(scores, sets, remembered.colsum);
      attended = merge(attended, remembered);
      if (request.recalls()) attended = merge(attended, recall.attend_chunk(sets, rows));
    }
    out.narrow(2, rows.begin, count).copy_(out_with_sinks(attended, options));
    if (begin > 0 && request.settings.error_rows > 0) measure_errors(request, out, rows);
    previous_begin = begin;
  });
  request.memory.fill_(-1);
  if (request.selects()) request.memory.narrow(2, 0, sets.size(2)).copy_(sets);
  if (request.ends_at_checkpoint()) select(length);
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("chunked_sparse_attention",
         &chunked_sparse_attention_entry<chunked_sparse_attention, dense_attention>);
  m.impl("prefill_attention_", &prefill_attention_entry<chunked_sparse_attention, dense_attention,
                                                        sliding_window_attention>);
  m.impl("paged_sparse_attention_",
         &paged_sparse_attention_entry<chunked_sparse_attention, dense_attention, gather_pages>);
}

}  // namespace h2o_prefill::composite
