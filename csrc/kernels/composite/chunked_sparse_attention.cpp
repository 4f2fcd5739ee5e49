#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "common/tensors.h"
#include "h2o_prefill/ops.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {
namespace {

// Attention of one chunk's queries to the keys that its blocks recall, or nothing where no block
// recalls any.
struct Recall {
  at::Tensor offsets;  // on the host
  at::Tensor positions;
  at::Tensor visible_from;
  int64_t block;
  int64_t past;

  // q: the chunk's queries, first_row the call's row of the first of them. memory: the heads' sets,
  // or undefined.
  Attended attend_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& memory, int64_t first_row, int64_t call_rows,
                        double scale) const {
    const int64_t blocks_of_row = (call_rows + block - 1) / block;
    const int64_t chunk_begin = past + first_row;
    std::vector<at::Tensor> rows_of_batch_out, rows_of_batch_lse;
    for (int64_t b = 0; b < q.size(0); ++b) {
      std::vector<at::Tensor> outs, lses;
      for (int64_t row = 0; row < q.size(2); row += block) {
        const int64_t rows = std::min(block, q.size(2) - row);
        const int64_t list = b * blocks_of_row + (first_row + row) / block;
        const int64_t from = offsets[list].item<int>();
        const int64_t count = offsets[list + 1].item<int>() - from;
        const auto keys = positions.narrow(0, from, count);
        const auto row_positions =
            at::arange(chunk_begin + row, chunk_begin + row + rows, keys.options());
        auto visible = (visible_from.narrow(0, from, count) <= row_positions.unsqueeze(-1))
                           .logical_and(keys < chunk_begin)
                           .expand({1, k.size(1), 1, rows, count});
        if (memory.defined()) {
          const auto held = (memory[b].unsqueeze(-1) == keys).any(1);  // [Hkv, count]
          visible = visible.logical_and(held.logical_not().view({1, k.size(1), 1, 1, count}));
        }
        const auto index = keys.to(at::kLong);
        const auto select = [&](const at::Tensor& t) {
          return t.narrow(0, b, 1).index_select(2, index);
        };
        const auto attended =
            attend(q.narrow(0, b, 1).narrow(2, row, rows), select(k), select(v), visible, scale);
        outs.push_back(attended.out);
        lses.push_back(attended.lse);
      }
      rows_of_batch_out.push_back(at::cat(outs, 2));
      rows_of_batch_lse.push_back(at::cat(lses, 2));
    }
    return {at::cat(rows_of_batch_out, 0), at::cat(rows_of_batch_lse, 0), {}};
  }
};

}  // namespace

// Chunk by chunk: the memory set from the scores so far, phase 1 and phase 2 of the chunk, the
// scores they give.
std::tuple<at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    int64_t chunk_size, int64_t local_window, int64_t heavy_budget, int64_t sink_tokens,
    int64_t dense_tail, std::string_view gqa_reduce, int64_t recall_block,
    std::optional<double> scale_argument) {
  check_chunked_sparse_attention(q, k, v, scores, memory, recall_offsets, recall_positions,
                                 recall_visible_from, last_chunk_begin, chunk_size, local_window,
                                 heavy_budget, sink_tokens, dense_tail, gqa_reduce, recall_block);
  const double scale = scale_or_default(scale_argument, q.size(3));
  const bool reduce_max = gqa_reduce == "max";
  const int64_t total = k.size(2);
  const int64_t length = q.size(2);
  const int64_t past = total - length;
  const int64_t width = sink_tokens + local_window + heavy_budget;

  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto new_scores = at::zeros({k.size(0), k.size(1), total}, q.options().dtype(accumulate_type(q)));
  if (scores) new_scores.narrow(2, 0, scores->size(2)).copy_(*scores);
  const bool continues = memory && past > 0;
  auto set = continues ? memory->clone(at::MemoryFormat::Contiguous)
                       : at::full({k.size(0), k.size(1), width}, -1, q.options().dtype(at::kInt));
  // A call without tokens hands the set on, in the width of these settings.
  if (length == 0) set = at::constant_pad_nd(set, {0, width - set.size(2)}, -1);
  Recall recall;
  if (recall_offsets)
    recall = {recall_offsets->cpu(), recall_positions->to(q.device()),
              recall_visible_from->to(q.device()), recall_block, past};

  int64_t previous_begin = last_chunk_begin;
  for (int64_t row = 0; row < length; row += chunk_size) {
    const int64_t rows = std::min(chunk_size, length - row);
    const int64_t begin = past + row;
    const auto queries = q.narrow(2, row, rows);
    auto attended = attend(queries, k.narrow(2, begin, rows), v.narrow(2, begin, rows),
                           causal_mask(rows, q), scale, reduce_max);
    new_scores.narrow(2, begin, rows).copy_(attended.colsum);
    if (begin > 0) {
      set = h2o_prefill::select_memory(new_scores.narrow(2, 0, begin), set, previous_begin, begin,
                                       local_window, heavy_budget, sink_tokens);
      const auto present = set >= 0;
      const auto remembered =
          attend(queries, h2o_prefill::gather_rows(k, set), h2o_prefill::gather_rows(v, set),
                 present.unsqueeze(2).unsqueeze(2), scale, reduce_max);
      new_scores.scatter_add_(2, set.clamp_min(0).to(at::kLong), remembered.colsum);
      attended = merge(attended, remembered);
      if (recall_offsets) {
        attended = merge(attended, recall.attend_chunk(queries, k, v, set, row, length, scale));
      }
    }
    out.narrow(2, row, rows).copy_(attended.out);
    previous_begin = begin;
  }
  if (const int64_t tail = std::min(dense_tail, length); tail > 0) {
    out.narrow(2, length - tail, tail)
        .copy_(composite::dense_attention(q.narrow(2, length - tail, tail), k, v, scale));
  }
  return {out, new_scores, set};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("chunked_sparse_attention", &chunked_sparse_attention);
}

}  // namespace h2o_prefill::composite
