// The operators, as C++ functions. Each goes through the PyTorch dispatcher, to the kernels of the
// tensors' device.
//
// Symbols: B batch, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), T tokens, D key dim, Dv
// value dim, M memory size. Tensors are float32, bfloat16, float16 or float64, all of one dtype and
// device; lse is the natural logarithm of the softmax's denominator; lse, column sums and scores
// are float32 (float64 for float64 inputs). scale defaults to D^-0.5. All are for inference: an
// input that requires a gradient while gradients are on is an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Phase 1: causal attention inside every chunk of chunk_size tokens.
// q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> out [B, Hq, T, Dv], lse [B, Hq, T],
// colsum [B, Hkv, T], where colsum[j] is the sum over the chunk's queries i and the group's heads
// of exp(z_ij - lse_i).
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size,
    std::optional<double> scale = std::nullopt);

// Phase 2: attention of all queries to the listed keys, without a mask.
// q [B, Hq, T, D], k and v the whole history, indices int32 [B, Hkv, M] (-1: absent, only at the
// end)
// -> out [B, Hq, T, Dv], lse [B, Hq, T], colsum [B, Hkv, M]. Without a key: out 0, lse -inf.
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& indices,
    std::optional<double> scale = std::nullopt);

// Exact causal attention: q [B, Hq, Tq, D] are the last rows of the history k [B, Hkv, T, D],
// v [B, Hkv, T, Dv] -> [B, Hq, Tq, Dv].
H2O_API at::Tensor dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   std::optional<double> scale = std::nullopt);

// Fuses two partial results over disjoint key sets. out_* [B, H, T, Dv], lse_* [B, H, T]; a row
// with lse -inf contributes nothing; both -inf give out 0 and lse -inf.
H2O_API std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a,
                                                        const at::Tensor& lse_a,
                                                        const at::Tensor& out_b,
                                                        const at::Tensor& lse_b);

// Builds the memory set that the chunk after chunk_end attends to: the first sink_tokens positions,
// the last local_window before chunk_end, and of the other candidates (memory and [chunk_begin,
// chunk_end)) the heavy_budget with the highest scores; of equal scores the lower position wins.
// scores [B, Hkv, Ts] (positions >= Ts have score 0), memory int32 [B, Hkv, any] -> int32 [B, Hkv,
// sink_tokens + local_window + heavy_budget], ascending, then -1.
H2O_API at::Tensor select_memory(const at::Tensor& scores, const at::Tensor& memory,
                                 int64_t chunk_begin, int64_t chunk_end, int64_t local_window,
                                 int64_t heavy_budget, int64_t sink_tokens);

// Copies rows: x [B, H, T, D], indices int32 [B, H, M] -> [B, H, M, D]; rows of -1 are 0.
H2O_API at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& indices);

// One layer's whole sparse prefill. q [B, Hq, T, D] are the call's queries, k and v the whole
// history, which ends with the call's tokens. scores [B, Hkv, <= T_total] and memory int32 [B, Hkv,
// any] are what the previous call of the prompt returned, last_chunk_begin where its last chunk
// began; none for a first call. The recall lists are those of lexical_recall, all or none. The last
// dense_tail queries attend to every key before them. gqa_reduce: "sum" or "max" over the column
// sums of a group's query heads. Returns out [B, Hq, T, Dv], scores [B, Hkv, T_total], and the
// memory set that the last chunk attended to, [B, Hkv, sink_tokens + local_window + heavy_budget].
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    int64_t chunk_size, int64_t local_window, int64_t heavy_budget, int64_t sink_tokens = 0,
    int64_t dense_tail = 0, std::string_view gqa_reduce = "sum", int64_t recall_block = 128,
    std::optional<double> scale = std::nullopt);

// Lexical recall: earlier places where the words before a token stood. token_ids int64 [B,
// T_total]; tokens from `begin` on are new. For a token at p of a chunk that begins at c, the
// longest suffix (max_suffix tokens at most) ending at p that also ended at places e < c gives its
// k latest such places; a single token counts only if it stood at most max_count times up to p.
// Recalled are the positions e to e + span - 1 before c, visible from p on. Returns ragged lists
// over blocks of `block` new tokens, all int32: offsets [B * n_blocks + 1], positions [nnz] and
// visible_from [nnz] (absolute positions); in a block each position stands once, by rising
// visible_from.
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> lexical_recall(
    const at::Tensor& token_ids, int64_t begin, int64_t chunk_size, int64_t block, int64_t k,
    int64_t max_suffix = 3, int64_t span = 2, int64_t max_count = 16);

}  // namespace h2o_prefill
