#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/entry.h"
#include "kernels/cuda/select_memory.h"

namespace h2o_prefill {
namespace {

// Recall lists where the kernels read them. On the host they are checked first, since a bad one
// would read outside of k and v; on the device they cannot be without waiting for it.
struct RecallLists {
  at::Tensor offsets;
  at::Tensor positions;
  at::Tensor visible_from;

  RecallLists(const at::Tensor& offsets_argument, const at::Tensor& positions_argument,
              const at::Tensor& visible_from_argument, int64_t total, const at::Tensor& q) {
    if (offsets_argument.is_cpu() && positions_argument.is_cpu()) {
      check_recall_values(offsets_argument.contiguous(), positions_argument.contiguous(), total);
    }
    const auto bring = [&](const at::Tensor& list) {
      return list.to(q.device(), list.scalar_type(), /*non_blocking=*/true).contiguous();
    };
    offsets = bring(offsets_argument);
    positions = bring(positions_argument);
    visible_from = bring(visible_from_argument);
  }
};

// The scores so far, fp32 [B, Hkv, T_total]: 0 where a token before the call has none, and not yet
// written for the tokens of the call.
at::Tensor with_room(const std::optional<at::Tensor>& scores, const at::Tensor& k, int64_t past) {
  auto all = at::empty({k.size(0), k.size(1), k.size(2)}, k.options().dtype(at::kFloat));
  const int64_t known = scores ? std::min(scores->size(2), past) : 0;
  if (known > 0) all.narrow(2, 0, known).copy_(scores->narrow(2, 0, known));
  if (known < past) all.narrow(2, known, past - known).zero_();
  return all;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention_cuda(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    int64_t chunk_size, int64_t local_window, int64_t heavy_budget, int64_t sink_tokens,
    int64_t dense_tail, std::string_view gqa_reduce, int64_t recall_block,
    std::optional<double> scale) {
  check_chunked_sparse_attention(q_argument, k_argument, v_argument, scores, memory, recall_offsets,
                                 recall_positions, recall_visible_from, last_chunk_begin,
                                 chunk_size, local_window, heavy_budget, sink_tokens, dense_tail,
                                 gqa_reduce, recall_block);
  if (!has_attention_kernel(q_argument, v_argument) || q_argument.numel() == 0) {
    return composite::chunked_sparse_attention(
        q_argument, k_argument, v_argument, scores, memory, recall_offsets, recall_positions,
        recall_visible_from, last_chunk_begin, chunk_size, local_window, heavy_budget, sink_tokens,
        dense_tail, gqa_reduce, recall_block, scale);
  }
  const c10::cuda::CUDAGuard guard(q_argument.device());
  const auto q = with_aligned_rows(q_argument);
  const auto k = with_aligned_rows(k_argument);
  const auto v = with_aligned_rows(v_argument);
  const int64_t total = k.size(2);
  const int64_t length = q.size(2);
  const int64_t past = total - length;
  const int64_t width = sink_tokens + local_window + heavy_budget;
  const bool reduce_max = gqa_reduce == "max";

  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto new_scores = with_room(scores, k, past);
  float* const score = new_scores.mutable_data_ptr<float>();
  const auto set_options = q.options().dtype(at::kInt);

  // Phase 1: all chunks at once.
  auto phase1 = forward_params(q, k, v, out, lse, scale_or_default(scale, q.size(3)));
  phase1.chunk_size = chunk_size;
  run(phase1);
  auto sums1 = column_sums_params(phase1, score, total);
  sums1.reduce_max = reduce_max;
  at::Tensor workspace;
  run(sums1, workspace, q);

  // Phase 2: chunk after chunk, each from the scores that the ones before it left.
  at::Tensor set;
  if (past > 0 || length > chunk_size) {
    std::optional<RecallLists> recall;
    if (recall_offsets) {
      recall.emplace(*recall_offsets, *recall_positions, *recall_visible_from, total, q);
    }
    auto memory_lse = at::empty_like(lse);
    at::Tensor next = at::empty({k.size(0), k.size(1), width}, set_options);
    at::Tensor spare = at::empty_like(next);
    if (memory && past > 0) set = memory->contiguous();

    auto phase2 = phase1;
    phase2.chunk_size = 0;
    phase2.gathered = true;
    phase2.width = width;
    phase2.memory_lse = memory_lse.mutable_data_ptr<float>();
    phase2.merge_with_out = true;
    if (recall) {
      phase2.recall_offsets = recall->offsets.const_data_ptr<int32_t>();
      phase2.recall_positions = recall->positions.const_data_ptr<int32_t>();
      phase2.recall_visible_from = recall->visible_from.const_data_ptr<int32_t>();
      phase2.recall_block = recall_block;
      phase2.recall_blocks = (length + recall_block - 1) / recall_block;
    }
    int64_t previous_begin = last_chunk_begin;
    for (int64_t row = 0; row < length; row += chunk_size) {
      const int64_t begin = past + row;
      if (begin > 0) {
        C10_CUDA_CHECK(launch_select_memory(
            {score, total, begin, set.defined() ? set.const_data_ptr<int32_t>() : nullptr,
             set.defined() ? set.size(2) : 0, next.mutable_data_ptr<int32_t>(),
             k.size(0) * k.size(1), previous_begin, begin, local_window, heavy_budget, sink_tokens},
            c10::cuda::getCurrentCUDAStream()));
        set = std::move(next);
        next = std::move(spare);
        spare = set;

        phase2.row_begin = row;
        phase2.rows = std::min(chunk_size, length - row);
        phase2.chunk_begin = begin;
        phase2.indices = set.const_data_ptr<int32_t>();
        run(phase2);
        if (width > 0) {
          auto sums2 = column_sums_params(phase2, score, total);
          sums2.lse = phase2.memory_lse;
          sums2.scatter_add = true;
          sums2.reduce_max = reduce_max;
          run(sums2, workspace, q);
        }
      }
      previous_begin = begin;
    }
  }
  if (!set.defined()) set = at::full({k.size(0), k.size(1), width}, -1, set_options);

  if (const int64_t tail = std::min(dense_tail, length); tail > 0) {
    auto dense = phase1;
    dense.chunk_size = 0;
    dense.lse = nullptr;
    dense.row_begin = length - tail;
    dense.rows = tail;
    run(dense);
  }
  return {out, new_scores, set};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunked_sparse_attention", &chunked_sparse_attention_cuda);
}

}  // namespace
}  // namespace h2o_prefill
