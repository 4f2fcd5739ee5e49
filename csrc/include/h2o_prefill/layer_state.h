// What one layer knows of one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Keys and values [B, Hkv, length, *] in buffers that grow by doubling; the state of sparse
// prefill: scores [B, Hkv, scored] of the tokens up to the end of the last sparse call, the memory
// set int32 [B, Hkv, M] that its last chunk attended to, errors fp32 [B, Hkv, kErrorFields], and
// where that chunk began; and, if asked for, checkpoints: what the next chunk needs at each
// multiple of the chunk size. Keys may as well lie elsewhere (attend_history). Tensors that methods
// return belong to the state: later calls change scores, memory set and errors in place. For
// inference.
class H2O_API LayerState : public torch::CustomClassHolder {
 public:
  static constexpr int64_t kInitialCapacity = 256;
  static constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

  // Capacities of keys and values in tokens: of the first allocation, and the largest.
  explicit LayerState(bool checkpoints = false, int64_t initial_capacity = kInitialCapacity,
                      int64_t max_capacity = kMostTokens);

  // The state of given buffers, as prefill_attention_() takes them, which the caller's calls
  // fill; commit() counts their tokens. It does not grow.
  static c10::intrusive_ptr<LayerState> of_buffers(const PrefillBuffers& buffers);
  // Counts the tokens after a call that ended at `length`; `past`: before it.
  void commit(int64_t past, int64_t length, bool is_sparse, int64_t last_chunk_begin);
  // Makes the state a copy of another in the present buffers. Throws c10::ValueError if those do
  // not fit it; check_fits() alone changes nothing.
  void check_fits(const LayerState& other) const;
  void copy_from(const LayerState& other);
  // Changes whether sparse calls keep checkpoints, and the largest capacity.
  void configure(bool checkpoints, int64_t max_capacity);

  // There are no implicit copies: they share tensors.
  explicit LayerState(const LayerState&) = default;
  LayerState& operator=(LayerState&&) = delete;

  // Appends key [B, Hkv, T, D] and value [B, Hkv, T, Dv]. Returns views of all tokens. Throws
  // c10::ValueError, and changes nothing, if they do not fit those that are there.
  std::tuple<at::Tensor, at::Tensor> append(const at::Tensor& key, const at::Tensor& value);

  // Replaces keys and values by tensors that the state does not write to: append() copies them.
  void set_keys(const at::Tensor& key, const at::Tensor& value);

  // Attends with query [B, Hq, T, D] of the last T of the first `total` tokens (default: of all),
  // which append() has added; sparsely or densely as the settings say, or exactly in a window that
  // the tokens do not fit into. Returns [B, Hq, T, Dv]. Where a call throws c10::ValueError, the
  // state stays as it was; after another exception in a sparse call, calls are refused until
  // reset(), or truncate() to a checkpoint.
  at::Tensor attend(const at::Tensor& query, const LayerOptions& options,
                    std::optional<int64_t> total = std::nullopt);

  // The same with the keys [B, Hkv, T_total, D] and values of all tokens, which the caller has.
  at::Tensor attend_history(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const LayerOptions& options);

  // Views of keys and values of the tokens in use, and the state of sparse prefill; undefined where
  // there is none.
  at::Tensor key() const { return in_use(key_, length_); }
  at::Tensor value() const { return in_use(value_, length_); }
  at::Tensor scores() const { return has_scores() ? in_use(scores_, scored_) : at::Tensor(); }
  at::Tensor memory() const { return has_scores() ? memory_ : at::Tensor(); }
  at::Tensor errors() const { return has_scores() ? errors_ : at::Tensor(); }

  int64_t length() const { return length_; }
  int64_t scored() const { return scored_; }
  int64_t last_chunk_begin() const { return last_chunk_begin_; }
  bool has_scores() const { return scored_ > 0; }
  // Tokens that the buffers of keys and values have room for.
  int64_t capacity() const { return key_.defined() ? key_.size(2) : 0; }
  int64_t initial_capacity() const { return initial_capacity_; }
  int64_t max_capacity() const { return max_capacity_; }

  // Replaces the state of sparse prefill by a copy. Throws c10::ValueError if the tensors do not
  // belong together. Checkpoints beyond its scores, or of another shape, are dropped.
  void set_scores(const PrefillState& state);
  // A copy of that state; undefined tensors if there is none.
  PrefillState prefill_state() const;

  // The set that the next chunk attends to, its scores and the errors: all that later calls need of
  // scores and memory set. settings: of the layer.
  Checkpoints checkpoint(const PrefillConfig& settings) const;
  // Keeps that for the tokens so far, as sparse calls do at multiples of the chunk size.
  void keep_checkpoint(const PrefillConfig& settings);
  // A state of `length` tokens without keys that goes on from a checkpoint.
  static c10::intrusive_ptr<LayerState> at_checkpoint(int64_t length,
                                                      const Checkpoints& checkpoint);

  // Removes the tokens after the first `length`. Exact at a checkpoint, after the last sparse call
  // and at 0. Elsewhere scores of the others stay, since the share of removed queries cannot be
  // separated; a cut before the last chunk empties the memory set, so that every remaining token is
  // a candidate again.
  void truncate(int64_t length);
  // The last length up to this one to which truncate() is exact: later calls give, to the bit, what
  // they give after a prompt that was never longer.
  int64_t checkpoint_before(int64_t length) const;
  // Removes all tokens; the buffers stay allocated.
  void reset() { truncate(0); }

  // Maps over the batch: rows int64 [B'] of the present ones, or each `repeats` times.
  void select(const at::Tensor& rows);
  void repeat(int64_t repeats);
  void to(const at::Device& device);
  // An independent copy, with the same room.
  c10::intrusive_ptr<LayerState> clone() const;

  // The pickled form: an int64 header, then plain tensors of what is in use: copies, or, for a
  // session, views of some and no limits of capacity. from_tensors() copies all but keys and
  // values, which it does not write to.
  std::vector<at::Tensor> tensors(bool copies = true) const;
  static c10::intrusive_ptr<LayerState> from_tensors(const std::vector<at::Tensor>& tensors);

 private:
  friend class MemorySetTracker;

  static at::Tensor in_use(const at::Tensor& buffer, int64_t length);
  // Gives scores, memory set and errors of the heads of key [B, Hkv, ...] room.
  void reserve(const at::Tensor& key, int64_t tokens, int64_t memory_size);
  // Tensors for the checkpoints of a sparse call; undefined if none are wanted or possible.
  Checkpoints new_checkpoints(const PrefillConfig& settings, int64_t past, int64_t length) const;
  void keep(const Checkpoints& written, int64_t past, int64_t chunk_size);
  template <typename Change>
  void map(const Change& change);

  bool keeps_checkpoints_;
  int64_t initial_capacity_;
  int64_t max_capacity_;
  at::Tensor key_, value_;  // [B, Hkv, capacity, *]
  bool owns_keys_ = true;   // else key_ and value_ are only read
  int64_t length_ = 0;      // tokens
  at::Tensor scores_ = {};  // [B, Hkv, any]; 0 from scored_ on
  at::Tensor memory_ = {};  // -1 without scores
  at::Tensor errors_ = {};  // 0 without scores
  int64_t scored_ = 0;      // tokens that have scores
  int64_t last_chunk_begin_ = 0;
  std::map<int64_t, Checkpoints> checkpoints_ = {};  // by length
  bool failed_ = false;                              // a sparse call was interrupted
};

}  // namespace h2o_prefill
