#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/memory_count.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

// The memory sets of all heads of one layer, and the scores that they are built from.
class MemoryChain {
 public:
  // scores: fp32 [B, Hkv, T_total], contiguous, updated in place. memory: the sets to start from,
  // or undefined.
  MemoryChain(const at::Tensor& scores, const at::Tensor& memory, int64_t local_window,
              int64_t heavy_budget, int64_t sink_tokens, int64_t max_chunk)
      : scores_(scores),
        heads_(scores.size(0) * scores.size(1)),
        width_(sink_tokens + local_window + heavy_budget),
        local_window_(local_window),
        heavy_budget_(heavy_budget),
        sink_tokens_(sink_tokens),
        counts_(heads_) {
    const auto options = scores.options().dtype(at::kInt);
    memory_ = at::full({scores.size(0), scores.size(1), width_}, -1, options);
    next_ = at::empty_like(memory_);
    colsum_ = at::empty({heads_, width_}, scores.options());
    start_ = memory.defined() ? memory.contiguous() : memory_;
    start_counts_ = memory_counts(start_, scores.size(2), "memory");
    candidates_ = std::max(width_, start_.size(2)) + max_chunk;
    workspace_ = at::empty({heads_, candidates_, 2}, scores.options());
  }

  // Builds the sets for the chunk that begins at chunk_end.
  void select(int64_t chunk_begin, int64_t chunk_end) {
    const at::Tensor& from = first_ ? start_ : memory_;
    const std::vector<int64_t>& from_counts = first_ ? start_counts_ : counts_;
    const int64_t from_width = from.size(2);
    const int64_t length = scores_.size(2);
    std::vector<int64_t> counts(heads_);
    at::parallel_for(0, heads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        counts[head] = select_memory_head(
            {from.const_data_ptr<int32_t>() + head * from_width, from_counts[head], chunk_begin,
             chunk_end, local_window_, heavy_budget_, sink_tokens_,
             next_.mutable_data_ptr<int32_t>() + head * width_},
            scores_.const_data_ptr<float>() + head * length, length,
            reinterpret_cast<ScoredPosition*>(workspace_.mutable_data_ptr<float>() +
                                              head * candidates_ * 2));
      }
    });
    std::swap(memory_, next_);
    counts_ = std::move(counts);
    first_ = false;
  }

  // Adds phase 2's column sums to the scores of the sets.
  void accumulate() {
    for (int64_t head = 0; head < heads_; ++head) {
      const int32_t* positions = memory_.const_data_ptr<int32_t>() + head * width_;
      const float* sums = colsum_.const_data_ptr<float>() + head * width_;
      float* scores = scores_.mutable_data_ptr<float>() + head * scores_.size(2);
      for (int64_t j = 0; j < counts_[head]; ++j) scores[positions[j]] += sums[j];
    }
  }

  KeySource key_source() {
    return {0,
            width_,
            memory_.const_data_ptr<int32_t>(),
            counts_.data(),
            false,
            colsum_.mutable_data_ptr<float>(),
            width_};
  }

  const at::Tensor& memory() const { return memory_; }
  int64_t width() const { return width_; }

 private:
  at::Tensor scores_;
  int64_t heads_;
  int64_t width_;
  int64_t local_window_;
  int64_t heavy_budget_;
  int64_t sink_tokens_;
  int64_t candidates_;
  bool first_ = true;
  at::Tensor start_;  // what the previous call left, of any width
  std::vector<int64_t> start_counts_;
  at::Tensor memory_;
  at::Tensor next_;
  std::vector<int64_t> counts_;
  at::Tensor colsum_;
  at::Tensor workspace_;
};

// The lists, checked: a bad one would read outside of k and v.
RecallSource recall_source(const at::Tensor& offsets, const at::Tensor& positions,
                           const at::Tensor& visible_from, int64_t block, int64_t blocks,
                           int64_t total) {
  const auto first = offsets.const_data_ptr<int32_t>();
  const int64_t count = positions.size(0);
  TORCH_CHECK_VALUE(first[0] == 0 && first[offsets.size(0) - 1] == count &&
                        std::is_sorted(first, first + offsets.size(0)),
                    "recall_offsets must rise from 0 to the number of recalled positions, ", count);
  const auto entry = positions.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(
      std::all_of(entry, entry + count, [&](int32_t p) { return p >= 0 && p < total; }),
      "recall_positions must be in [0, ", total, ")");
  return {first, entry, visible_from.const_data_ptr<int32_t>(), block, blocks};
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
  auto new_scores = at::zeros({k.size(0), k.size(1), total}, lse.options());
  if (scores) new_scores.narrow(2, 0, scores->size(2)).copy_(*scores);
  MemoryChain chain(new_scores, memory && past ? *memory : at::Tensor(), local_window, heavy_budget,
                    sink_tokens, std::max(largest, past - last_chunk_begin));
  if (q.size(0) == 0) return {out, new_scores, chain.memory()};

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
  const bool has_memory = past > 0 || length > chunk_size;
  AttendChunk attend(args.query, args.key, args.value, args.recall, largest, largest,
                     has_memory ? std::min(chain.width(), total) : 0);

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
      chain.select(previous_begin, begin);
      args.sets[1] = chain.key_source();
      args.num_sets = 2;
    }
    attend.run(args);
    if (begin > 0) chain.accumulate();
    previous_begin = begin;
  }
  if (const int64_t tail = std::min(dense_tail, length); tail > 0) {
    out.narrow(2, length - tail, tail)
        .copy_(composite::dense_attention(q.narrow(2, length - tail, tail), k, v, scale));
  }
  return {out, new_scores, chain.memory()};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunked_sparse_attention", &chunked_sparse_attention_cpu);
}

}  // namespace
}  // namespace h2o_prefill
