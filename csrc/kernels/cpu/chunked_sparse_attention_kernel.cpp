#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/dense_attention.h"
#include "kernels/cpu/memory_chain.h"

namespace h2o_prefill {
namespace {

RecallSource recall_source(const at::Tensor& offsets, const at::Tensor& positions,
                           const at::Tensor& visible_from, int64_t block, int64_t blocks,
                           int64_t total) {
  check_recall_values(offsets, positions, total);
  return {offsets.const_data_ptr<int32_t>(), positions.const_data_ptr<int32_t>(),
          visible_from.const_data_ptr<int32_t>(), block, blocks};
}

// The scores so far, fp32 [B, Hkv, T_total], with 0 for what has none. Filled here, since a call of
// few tokens would spend more on PyTorch's own filling than on attention.
at::Tensor with_room(const std::optional<at::Tensor>& scores, const at::Tensor& k) {
  auto all = at::empty({k.size(0), k.size(1), k.size(2)}, k.options().dtype(at::kFloat));
  std::fill_n(all.mutable_data_ptr<float>(), all.numel(), 0.0F);
  if (scores) all.narrow(2, 0, scores->size(2)).copy_(*scores);
  return all;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention_cpu(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    int64_t chunk_size, int64_t local_window, int64_t heavy_budget, int64_t sink_tokens,
    int64_t dense_tail, std::string_view gqa_reduce, int64_t recall_block,
    std::optional<double> scale_argument) {
  if (q_argument.scalar_type() == at::kDouble || q_argument.size(2) == 0) {
    return composite::chunked_sparse_attention(
        q_argument, k_argument, v_argument, scores, memory, recall_offsets, recall_positions,
        recall_visible_from, last_chunk_begin, chunk_size, local_window, heavy_budget, sink_tokens,
        dense_tail, gqa_reduce, recall_block, scale_argument);
  }
  check_chunked_sparse_attention(q_argument, k_argument, v_argument, scores, memory, recall_offsets,
                                 recall_positions, recall_visible_from, last_chunk_begin,
                                 chunk_size, local_window, heavy_budget, sink_tokens, dense_tail,
                                 gqa_reduce, recall_block);
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const int64_t total = k.size(2);
  const int64_t length = q.size(2);
  const int64_t past = total - length;
  const int64_t largest = std::min(chunk_size, length);
  const double scale = scale_or_default(scale_argument, q.size(3));

  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto new_scores = with_room(scores, k);
  const MemoryBudget budget{local_window, heavy_budget, sink_tokens};
  if (q.size(0) == 0) return {out, new_scores, empty_memory(new_scores, budget)};
  std::optional<MemoryChain> chain;
  if (past > 0 || length > chunk_size) {
    chain.emplace(new_scores, memory && past ? *memory : at::Tensor(), budget,
                  std::max(largest, past - last_chunk_begin));
  }

  at::Tensor lists[3];
  AttendChunkArgs args{};
  if (recall_offsets) {
    lists[0] = recall_offsets->contiguous();
    lists[1] = recall_positions->contiguous();
    lists[2] = recall_visible_from->contiguous();
    args.recall = recall_source(lists[0], lists[1], lists[2], recall_block,
                                (length + recall_block - 1) / recall_block, total);
  }
  args.query = heads_view(q);
  args.key = heads_view(k);
  args.value = heads_view(v);
  args.out = heads_view(out);
  args.lse = lse.mutable_data_ptr<float>();
  args.past = past;
  args.scale = static_cast<float>(scale);
  args.reduce_max = gqa_reduce == "max";
  AttendChunk attend(args.query, args.key, args.value, args.recall, largest, largest,
                     chain ? std::min(budget.width(), total) : 0);

  int64_t previous_begin = last_chunk_begin;
  for (int64_t row = 0; row < length; row += chunk_size) {
    const int64_t begin = past + row;
    args.begin = row;
    args.rows = std::min(chunk_size, length - row);
    args.sets[0] = {begin,   args.rows, nullptr,
                    nullptr, true,      new_scores.mutable_data_ptr<float>() + begin,
                    total};
    args.num_sets = 1;
    if (begin > 0) {
      chain->select(previous_begin, begin);
      args.sets[1] = chain->key_source();
      args.num_sets = 2;
    }
    attend.run(args);
    if (begin > 0) chain->accumulate();
    previous_begin = begin;
  }
  if (const int64_t tail = std::min(dense_tail, length); tail > 0) {
    out.narrow(2, length - tail, tail)
        .copy_(dense_attention_cpu(q.narrow(2, length - tail, tail), k, v, scale));
  }
  return {out, new_scores, chain ? chain->memory() : empty_memory(new_scores, budget)};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunked_sparse_attention", &chunked_sparse_attention_cpu);
}

}  // namespace
}  // namespace h2o_prefill
