#include "common/checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "common/tensors.h"

namespace h2o_prefill {
namespace {

using at::Tensor;

void check_at_least(const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, name, " must be >= ", least, ", got ", value);
}

void check_dims(const char* name, const Tensor& t, int64_t dims) {
  TORCH_CHECK_VALUE(t.dim() == dims, name, " must have ", dims, " dimensions, got shape ",
                    t.sizes());
}

void check_size(const char* name, const Tensor& t, int64_t dim, int64_t size, const char* rule) {
  TORCH_CHECK_VALUE(t.size(dim) == size, name, " must have ", rule, " (", size, ") in dimension ",
                    dim, ", got shape ", t.sizes());
}

void check_float(const char* name, const Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_VALUE(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble, name,
      " must be float32, bfloat16, float16 or float64, got ", type);
}

void check_dtype(const char* name, const Tensor& t, at::ScalarType type) {
  TORCH_CHECK_VALUE(t.scalar_type() == type, name, " must be ", type, ", got ", t.scalar_type());
}

void check_same(const char* name, const Tensor& t, const char* other_name, const Tensor& other) {
  check_dtype(name, t, other.scalar_type());
  TORCH_CHECK_VALUE(t.device() == other.device(), name, " must be on the device of ", other_name,
                    " (", other.device(), "), got ", t.device());
}

void check_device(const char* name, const Tensor& t, const Tensor& q) {
  TORCH_CHECK_VALUE(t.device() == q.device(), name, " must be on the device of q (", q.device(),
                    "), got ", t.device());
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_dims("q", q, 4);
  check_dims("k", k, 4);
  check_dims("v", v, 4);
  check_float("q", q);
  check_same("k", k, "q", q);
  check_same("v", v, "q", q);
  check_size("k", k, 0, q.size(0), "the batch size of q");
  check_size("v", v, 0, q.size(0), "the batch size of q");
  check_size("k", k, 3, q.size(3), "the head dim of q");
  check_size("v", v, 1, k.size(1), "the heads of k");
  check_size("v", v, 2, k.size(2), "the length of k");
  TORCH_CHECK_VALUE(q.size(3) > 0 && v.size(3) > 0, "head dims must be > 0, got ", q.size(3),
                    " and ", v.size(3));
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    "the query heads must be a multiple of the KV heads, got ", q.size(1), " and ",
                    k.size(1));
  TORCH_CHECK_VALUE(k.size(2) <= std::numeric_limits<int32_t>::max(),
                    "k must have fewer than 2^31 rows, got ", k.size(2));
}

// [B, Hkv, *] beside k.
void check_per_kv_head(const char* name, const Tensor& t, const Tensor& k) {
  check_dims(name, t, 3);
  check_size(name, t, 0, k.size(0), "the batch size");
  check_size(name, t, 1, k.size(1), "the KV heads");
}

void check_budgets(int64_t local_window, int64_t heavy_budget, int64_t sink_tokens) {
  check_at_least("local_window", local_window, 0);
  check_at_least("heavy_budget", heavy_budget, 0);
  check_at_least("sink_tokens", sink_tokens, 0);
}

}  // namespace

void check_intra_chunk_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                 int64_t chunk_size) {
  check_qkv(q, k, v);
  check_size("k", k, 2, q.size(2), "the length of q");
  check_at_least("chunk_size", chunk_size, 1);
}

void check_memory_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& indices) {
  check_qkv(q, k, v);
  check_dtype("indices", indices, at::kInt);
  check_device("indices", indices, q);
  check_per_kv_head("indices", indices, k);
}

void check_dense_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_qkv(q, k, v);
  TORCH_CHECK_VALUE(k.size(2) >= q.size(2), "k must hold the history with the call's ", q.size(2),
                    " tokens, got length ", k.size(2));
}

void check_merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                        const Tensor& lse_b) {
  check_dims("out_a", out_a, 4);
  check_float("out_a", out_a);
  check_same("out_b", out_b, "out_a", out_a);
  TORCH_CHECK_VALUE(out_b.sizes() == out_a.sizes(), "out_b must have the shape of out_a ",
                    out_a.sizes(), ", got ", out_b.sizes());
  const auto check_lse = [&](const char* name, const Tensor& lse) {
    check_dtype(name, lse, accumulate_type(out_a));
    check_device(name, lse, out_a);
    TORCH_CHECK_VALUE(lse.sizes() == out_a.sizes().slice(0, 3), name, " must have shape ",
                      out_a.sizes().slice(0, 3), ", got ", lse.sizes());
  };
  check_lse("lse_a", lse_a);
  check_lse("lse_b", lse_b);
}

void check_select_memory(const Tensor& scores, const Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens) {
  check_dims("scores", scores, 3);
  TORCH_CHECK_VALUE(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble,
                    "scores must be float32 or float64, got ", scores.scalar_type());
  check_dtype("memory", memory, at::kInt);
  check_device("memory", memory, scores);
  check_per_kv_head("memory", memory, scores);
  check_at_least("chunk_begin", chunk_begin, 0);
  TORCH_CHECK_VALUE(chunk_end >= chunk_begin, "chunk_end must be >= chunk_begin (", chunk_begin,
                    "), got ", chunk_end);
  check_budgets(local_window, heavy_budget, sink_tokens);
}

void check_gather_rows(const Tensor& x, const Tensor& indices) {
  check_dims("x", x, 4);
  check_float("x", x);
  check_dtype("indices", indices, at::kInt);
  check_device("indices", indices, x);
  check_per_kv_head("indices", indices, x);
}

void check_chunked_sparse_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& scores,
    const std::optional<Tensor>& memory, const std::optional<Tensor>& recall_offsets,
    const std::optional<Tensor>& recall_positions, const std::optional<Tensor>& recall_visible_from,
    int64_t last_chunk_begin, int64_t chunk_size, int64_t local_window, int64_t heavy_budget,
    int64_t sink_tokens, int64_t dense_tail, std::string_view gqa_reduce, int64_t recall_block) {
  check_qkv(q, k, v);
  const int64_t past = k.size(2) - q.size(2);
  TORCH_CHECK_VALUE(past >= 0, "k must hold the call's tokens, so be at least as long as q (",
                    q.size(2), "), got ", k.size(2));
  if (scores) {
    check_dtype("scores", *scores, accumulate_type(q));
    check_device("scores", *scores, q);
    check_per_kv_head("scores", *scores, k);
    TORCH_CHECK_VALUE(scores->size(2) <= k.size(2), "scores must not be longer than k (", k.size(2),
                      "), got ", scores->size(2));
  }
  if (memory) {
    check_dtype("memory", *memory, at::kInt);
    check_device("memory", *memory, q);
    check_per_kv_head("memory", *memory, k);
  }
  TORCH_CHECK_VALUE(last_chunk_begin >= 0 && last_chunk_begin <= past,
                    "last_chunk_begin must be in [0, ", past,
                    "], the tokens before this call, got ", last_chunk_begin);
  check_at_least("chunk_size", chunk_size, 1);
  check_budgets(local_window, heavy_budget, sink_tokens);
  check_at_least("dense_tail", dense_tail, 0);
  TORCH_CHECK_VALUE(gqa_reduce == "sum" || gqa_reduce == "max",
                    "gqa_reduce must be \"sum\" or \"max\", got \"", gqa_reduce, "\"");
  TORCH_CHECK_VALUE(
      recall_offsets.has_value() == recall_positions.has_value() &&
          recall_offsets.has_value() == recall_visible_from.has_value(),
      "recall_offsets, recall_positions and recall_visible_from must be given together");
  if (!recall_offsets) return;
  check_at_least("recall_block", recall_block, 1);
  TORCH_CHECK_VALUE(chunk_size % recall_block == 0,
                    "chunk_size must be a multiple of recall_block, got ", chunk_size, " and ",
                    recall_block);
  const auto check_list = [&](const char* name, const Tensor& list, int64_t length) {
    check_dims(name, list, 1);
    check_dtype(name, list, at::kInt);
    // The host finds them (see lexical_recall); a kernel of another device copies them.
    if (!list.is_cpu()) check_device(name, list, q);
    check_size(name, list, 0, length, "one entry each");
  };
  const int64_t blocks = (q.size(2) + recall_block - 1) / recall_block;
  check_list("recall_offsets", *recall_offsets, q.size(0) * blocks + 1);
  check_list("recall_positions", *recall_positions, recall_positions->numel());
  check_list("recall_visible_from", *recall_visible_from, recall_positions->numel());
}

void check_recall_values(const Tensor& recall_offsets, const Tensor& recall_positions,
                         int64_t total) {
  const int32_t* first = recall_offsets.const_data_ptr<int32_t>();
  const int64_t count = recall_positions.size(0);
  TORCH_CHECK_VALUE(first[0] == 0 && first[recall_offsets.size(0) - 1] == count &&
                        std::is_sorted(first, first + recall_offsets.size(0)),
                    "recall_offsets must rise from 0 to the number of recalled positions, ", count);
  const int32_t* entry = recall_positions.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(
      std::all_of(entry, entry + count, [&](int32_t p) { return p >= 0 && p < total; }),
      "recall_positions must be in [0, ", total, ")");
}

void check_lexical_recall(const Tensor& token_ids, int64_t begin, int64_t chunk_size, int64_t block,
                          int64_t k, int64_t max_suffix, int64_t span, int64_t max_count) {
  check_dims("token_ids", token_ids, 2);
  check_dtype("token_ids", token_ids, at::kLong);
  TORCH_CHECK_VALUE(begin >= 0 && begin <= token_ids.size(1), "begin must be in [0, ",
                    token_ids.size(1), "], got ", begin);
  check_at_least("block", block, 1);
  check_at_least("chunk_size", chunk_size, 1);
  TORCH_CHECK_VALUE(chunk_size % block == 0, "chunk_size must be a multiple of block, got ",
                    chunk_size, " and ", block);
  check_at_least("k", k, 1);
  check_at_least("max_suffix", max_suffix, 1);
  check_at_least("span", span, 1);
  check_at_least("max_count", max_count, 1);
}

}  // namespace h2o_prefill
