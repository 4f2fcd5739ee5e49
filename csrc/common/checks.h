// The argument checks of every op, called by each of its kernels, so that no caller can pass them
// by.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace h2o_prefill {

void check_intra_chunk_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 int64_t chunk_size);

void check_memory_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& indices);

void check_dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

void check_merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                        const at::Tensor& lse_b);

void check_select_memory(const at::Tensor& scores, const at::Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens);

void check_gather_rows(const at::Tensor& x, const at::Tensor& indices);

void check_chunked_sparse_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const std::optional<at::Tensor>& scores,
                                    const std::optional<at::Tensor>& memory,
                                    const std::optional<at::Tensor>& recall_offsets,
                                    const std::optional<at::Tensor>& recall_positions,
                                    const std::optional<at::Tensor>& recall_visible_from,
                                    int64_t last_chunk_begin, int64_t chunk_size,
                                    int64_t local_window, int64_t heavy_budget, int64_t sink_tokens,
                                    int64_t dense_tail, std::string_view gqa_reduce,
                                    int64_t recall_block);

// The values of recall lists on the host, contiguous: a bad one would read outside of the total
// keys.
void check_recall_values(const at::Tensor& recall_offsets, const at::Tensor& recall_positions,
                         int64_t total);

void check_lexical_recall(const at::Tensor& token_ids, int64_t begin, int64_t chunk_size,
                          int64_t block, int64_t k, int64_t max_suffix, int64_t span,
                          int64_t max_count);

}  // namespace h2o_prefill
