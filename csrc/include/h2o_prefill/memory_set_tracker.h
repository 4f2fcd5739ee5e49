// Scores and memory sets of every layer, for one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/layer_state.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// The scores and memory sets of layers: see LayerState. Per layer: scores, fp32 [B, Hkv, length]
// (float64 beside float64 queries); memory, int32 [B, Hkv, memory_size], ascending, -1 where
// absent; errors, fp32 [B, Hkv, kErrorFields]; and where the last chunk began. A layer is empty
// until its first scores arrive. Updates are in place: arguments are copied, and the tensors that
// scores(), indices() and errors() return change with later updates.
//
// Chunk by chunk: build_memory_set, attend to it, init_chunk_scores, accumulate_memory_scores.
// chunked_sparse_attention does all of this in one call, and update() takes its result.
class H2O_API MemorySetTracker : public torch::CustomClassHolder {
 public:
  // L, H and K of every layer.
  MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                   int64_t sink_tokens);

  // The budgets of a config.
  MemorySetTracker(int64_t num_layers, const PrefillConfig& config);

  // A view of these layers, with the budgets of a config.
  MemorySetTracker(std::vector<c10::intrusive_ptr<LayerState>> layers, const PrefillConfig& config);

  // There are no implicit copies, which would share buffers.
  MemorySetTracker& operator=(MemorySetTracker&&) = delete;

  // Sets the scores of a new chunk to the column sums of its phase 1: colsum fp32 [B, Hkv, T] for
  // positions [chunk_begin, chunk_begin + T), which have no score yet. Positions between the
  // old length and chunk_begin get score 0.
  void init_chunk_scores(int64_t layer, int64_t chunk_begin, const at::Tensor& colsum);

  // Adds the column sums of phase 2, fp32 [B, Hkv, M], to the scores of the memory set.
  void accumulate_memory_scores(int64_t layer, const at::Tensor& colsum);

  // Builds the set that the chunk after position chunk_end attends to, from the present set and
  // [last chunk's begin, chunk_end), with L and H of the layer for every head. Returns it: int32
  // [B, Hkv, memory_size]. Positions before chunk_end without a score get 0; none after it may have
  // one yet.
  at::Tensor build_memory_set(int64_t layer, int64_t chunk_end);

  // The memory set of a layer, its scores and its errors. Throws for a layer without scores.
  at::Tensor indices(int64_t layer) const { return scored(layer).memory(); }
  at::Tensor scores(int64_t layer) const { return scored(layer).scores(); }
  at::Tensor errors(int64_t layer) const { return scored(layer).errors(); }

  const c10::intrusive_ptr<LayerState>& layer(int64_t layer) const;
  bool has_scores(int64_t layer) const { return this->layer(layer)->has_scores(); }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  // Positions that a memory set of a layer holds at most, and L, H and K.
  int64_t memory_size(int64_t layer = 0) const {
    return layer == 0 ? first_memory_size_ : memory_size_;
  }
  int64_t local_window() const { return local_window_; }
  int64_t heavy_budget() const { return heavy_budget_; }
  int64_t sink_tokens() const { return sink_tokens_; }

  // Number of positions that have scores; 0 for a layer without.
  int64_t length(int64_t layer) const { return this->layer(layer)->scored(); }

  // Where the last chunk of a layer began; 0 for a layer without scores.
  int64_t last_chunk_begin(int64_t layer) const { return this->layer(layer)->last_chunk_begin(); }

  // A copy of a layer's state; undefined tensors for a layer without scores.
  PrefillState state(int64_t layer) const { return this->layer(layer)->prefill_state(); }

  // Replaces the state of a layer by a copy of a result of chunked_sparse_attention or state().
  void update(int64_t layer, const PrefillState& state);

  // LayerState::checkpoint_before() and truncate() of all layers.
  int64_t checkpoint_before(int64_t length) const;
  void truncate(int64_t length);

  // Clears every layer.
  void reset() { truncate(0); }

  // The pickled form: plain tensors.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<MemorySetTracker> from_tensors(const std::vector<at::Tensor>& tensors);
  // An independent copy.
  c10::intrusive_ptr<MemorySetTracker> clone() const { return from_tensors(state_tensors()); }

 private:
  LayerState& scored(int64_t layer) const;

  std::vector<c10::intrusive_ptr<LayerState>> layers_;
  int64_t local_window_;
  int64_t heavy_budget_;
  int64_t sink_tokens_;
  int64_t first_memory_size_;  // of layer 0, in which no errors are measured
  int64_t memory_size_;
};

}  // namespace h2o_prefill
