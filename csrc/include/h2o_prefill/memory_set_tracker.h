// Scores and memory sets of every layer, for one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <map>
#include <vector>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Per layer: scores, fp32 [B, Hkv, length] (float64 beside float64 queries), in a buffer that grows
// by doubling; memory, int32 [B, Hkv, memory_size], ascending, -1 where absent; errors, fp32 [B,
// Hkv, kErrorFields]; and where the last chunk began. A layer is empty until its first scores
// arrive. Updates are in place: arguments are copied, and the tensors that scores(), indices() and
// errors() return change with later updates.
//
// Chunk by chunk: build_memory_set, attend to it, init_chunk_scores, accumulate_memory_scores.
// chunked_sparse_attention does all of this in one call, and update() takes its result;
// prefill_attention_ does it in the buffers that reserve() returns.
class H2O_API MemorySetTracker : public torch::CustomClassHolder {
 public:
  // L, H and K of every layer.
  MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                   int64_t sink_tokens);

  // The budgets of a config. checkpoints: whether sparse calls keep what the next chunk needs at
  // each multiple of the chunk size, so that truncate() to it is exact.
  MemorySetTracker(int64_t num_layers, const PrefillConfig& config, bool checkpoints = false);

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
  at::Tensor indices(int64_t layer) const;
  at::Tensor scores(int64_t layer) const;
  at::Tensor errors(int64_t layer) const;

  bool has_scores(int64_t layer) const { return layer_at(layer).has_scores; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  // Positions that a memory set of a layer holds at most, and L, H and K.
  int64_t memory_size(int64_t layer = 0) const { return layer_at(layer).memory_size; }
  int64_t local_window(int64_t layer = 0) const { return layer_at(layer).local_window; }
  int64_t heavy_budget(int64_t layer = 0) const { return layer_at(layer).heavy_budget; }
  int64_t sink_tokens() const { return sink_tokens_; }

  // Number of positions that have scores; 0 for a layer without.
  int64_t length(int64_t layer) const { return layer_at(layer).length; }

  // Where the last chunk of a layer began; 0 for a layer without scores.
  int64_t last_chunk_begin(int64_t layer) const { return layer_at(layer).last_chunk_begin; }

  // A copy of a layer's state; undefined tensors for a layer without scores.
  PrefillState state(int64_t layer) const;

  // Replaces the state of a layer by a copy of a result of chunked_sparse_attention or state();
  // undefined tensors make it a layer without scores. rewind: to a state that it had, whose
  // checkpoints stay.
  void update(int64_t layer, const PrefillState& state);
  void rewind(int64_t layer, const PrefillState& state);

  // The buffers of a layer, scores [B, Hkv, capacity or more], memory and errors, for a call of
  // prefill_attention_() with keys like `key`; commit() counts the tokens of a sparse call.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> reserve(int64_t layer, const at::Tensor& key,
                                                         int64_t capacity);
  void commit(int64_t layer, int64_t length, int64_t last_chunk_begin);

  // Where the next `count` checkpoints of a layer go, for a call of prefill_attention_() after
  // `past` tokens; undefined tensors if none are kept, because nothing asked for them or `past` is
  // no checkpoint. keep_checkpoints() takes them after the call.
  Checkpoints reserve_checkpoints(int64_t layer, int64_t past, int64_t count) const;
  void keep_checkpoints(int64_t layer, int64_t past, int64_t chunk_size, const Checkpoints& kept);

  // All checkpoints of a layer, as keep_checkpoints() takes them for a past of 0, as wide as the
  // largest set; undefined tensors if there are none.
  Checkpoints checkpoints(int64_t layer) const;

  // The last length up to this one to which truncate() is exact: later calls give, to the bit, what
  // they give after a prompt that was never longer. That is a checkpoint, any length after the last
  // sparse call, or 0.
  int64_t checkpoint_before(int64_t length) const;

  // Removes the tokens after the first `length`, of all layers or of one. If that is no checkpoint,
  // the scores of the others stay as they are: the share of removed queries cannot be separated. If
  // the cut lies before the last chunk, the memory set is emptied, and every remaining token is a
  // candidate again.
  void truncate(int64_t length);
  void truncate_layer(int64_t layer, int64_t length);

  // Clears every layer.
  void reset();

  // The pickled form: plain tensors, without checkpoints. Both directions copy.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<MemorySetTracker> from_tensors(const std::vector<at::Tensor>& tensors);
  // An independent copy.
  c10::intrusive_ptr<MemorySetTracker> clone() const { return from_tensors(state_tensors()); }

 private:
  struct Layer {
    int64_t local_window = 0;
    int64_t heavy_budget = 0;
    int64_t memory_size = 0;
    at::Tensor scores = {};  // [B, Hkv, capacity]; 0 from `length` on
    at::Tensor memory = {};
    at::Tensor errors = {};
    bool has_scores = false;  // buffers alone are no state
    int64_t length = 0;
    int64_t last_chunk_begin = 0;
    std::map<int64_t, Checkpoints> checkpoints = {};  // by length; tensors [B, Hkv, ...]
  };

  const Layer& layer_at(int64_t layer) const;
  const Layer& scored_layer_at(int64_t layer) const;
  // Clears a layer except for its budgets.
  void clear(int64_t layer);
  // Makes room for scores of `length` positions and the heads of x [B, Hkv, ...].
  void grow(int64_t layer, const at::Tensor& x, at::ScalarType type, int64_t length);

  int64_t sink_tokens_;
  bool keeps_checkpoints_ = false;
  std::vector<Layer> layers_;
};

}  // namespace h2o_prefill
