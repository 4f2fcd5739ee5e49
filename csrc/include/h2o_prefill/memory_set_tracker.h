// Scores and memory set of every layer of one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Per layer: scores, fp32 [B, Hkv, length] (float64 beside float64 queries); memory, int32 [B, Hkv,
// K + L + H], ascending, -1 where absent; and where the last chunk began. A layer is empty until
// its first scores arrive. Tensors that come in are kept, not copied, and never written to.
//
// Chunk by chunk: build_memory_set, attend to it, init_chunk_scores, accumulate_memory_scores.
// chunked_sparse_attention does all of it in one call, and update takes what it returned.
class H2O_API MemorySetTracker : public torch::CustomClassHolder {
 public:
  MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                   int64_t sink_tokens);

  // Sets the scores of a new chunk to the column sums of its phase 1: colsum fp32 [B, Hkv, T] for
  // positions [chunk_begin, chunk_begin + T), none of which has a score yet. Positions between the
  // old length and chunk_begin get score 0.
  void init_chunk_scores(int64_t layer, int64_t chunk_begin, const at::Tensor& colsum);

  // Adds the column sums of phase 2, fp32 [B, Hkv, M], to the scores of the memory set.
  void accumulate_memory_scores(int64_t layer, const at::Tensor& colsum);

  // Builds the set that the chunk after position chunk_end attends to, from the present set and
  // [last chunk's begin, chunk_end). Returns it: int32 [B, Hkv, K + L + H]. Positions before
  // chunk_end that have no score get 0; there is no score behind it yet.
  at::Tensor build_memory_set(int64_t layer, int64_t chunk_end);

  // The memory set of a layer, and its scores. Throws for a layer without scores.
  at::Tensor indices(int64_t layer) const;
  at::Tensor scores(int64_t layer) const;

  bool has_scores(int64_t layer) const;
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t memory_size() const { return local_window_ + heavy_budget_ + sink_tokens_; }
  int64_t local_window() const { return local_window_; }
  int64_t heavy_budget() const { return heavy_budget_; }
  int64_t sink_tokens() const { return sink_tokens_; }

  // Where the last chunk of a layer began; 0 for a layer without scores.
  int64_t last_chunk_begin(int64_t layer) const;

  // Replaces the state of a layer by what chunked_sparse_attention returned.
  void update(int64_t layer, const at::Tensor& scores, const at::Tensor& memory,
              int64_t last_chunk_begin);

  // Forgets every layer.
  void reset();

  // Everything as plain tensors, and back: the pickled form. Copies.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<MemorySetTracker> from_tensors(const std::vector<at::Tensor>& tensors);

 private:
  struct Layer {
    at::Tensor scores;
    at::Tensor memory;
    int64_t last_chunk_begin = 0;
  };

  const Layer& layer_at(int64_t layer) const;
  const Layer& scored_layer_at(int64_t layer) const;
  void check_layer_tensors(const at::Tensor& scores, const at::Tensor& memory,
                           int64_t last_chunk_begin) const;

  int64_t local_window_;
  int64_t heavy_budget_;
  int64_t sink_tokens_;
  std::vector<Layer> layers_;
};

}  // namespace h2o_prefill
