// Preallocated keys and values of every layer, for one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <tuple>
#include <vector>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Keys and values live in separate buffers [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv] per
// layer, allocated at the first append with the shape, dtype and device of its arguments, which
// later appends must match while the layer holds tokens. A full buffer grows by doubling, up to
// max_capacity tokens; beyond that append throws. An append that throws changes nothing. For
// inference: a key or value that requires a gradient while gradients are on is an error.
class H2O_API ChunkedKVCache : public torch::CustomClassHolder {
 public:
  // initial_capacity: capacity of the first allocation, in tokens; max_capacity: maximum number of
  // tokens of a layer.
  ChunkedKVCache(int64_t num_layers, int64_t initial_capacity, int64_t max_capacity);

  // There are no implicit copies, which would share buffers.
  ChunkedKVCache& operator=(ChunkedKVCache&&) = delete;

  // Appends key [B, Hkv, T, D] and value [B, Hkv, T, Dv] to a layer. Returns views of the whole
  // history, [B, Hkv, length, D] and [B, Hkv, length, Dv]. Later appends do not change their
  // contents, unless truncate() came first.
  std::tuple<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& key,
                                            const at::Tensor& value);

  // Buffers of a layer, [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv], with room for key and
  // value after the tokens that it holds. Nothing is written or counted: prefill_attention_()
  // writes the tokens, and commit() counts them.
  std::tuple<at::Tensor, at::Tensor> reserve(int64_t layer, const at::Tensor& key,
                                             const at::Tensor& value);
  void commit(int64_t layer, int64_t num_tokens);

  // Views of a layer's keys and values, [B, Hkv, length, *]. Throws if it holds no token.
  at::Tensor key(int64_t layer) const;
  at::Tensor value(int64_t layer) const;

  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t length(int64_t layer) const { return layer_at(layer).length; }
  int64_t initial_capacity() const { return initial_capacity_; }
  int64_t max_capacity() const { return max_capacity_; }

  // Capacity of a layer's buffers in tokens; 0 before its first append.
  int64_t capacity(int64_t layer) const;

  // Removes the tokens after the first `length`, of all layers or of one.
  void truncate(int64_t length);
  void truncate_layer(int64_t layer, int64_t length);

  // Removes all tokens; the buffers stay allocated.
  void reset();

  // The pickled form: plain tensors. Both directions copy, and only the tokens in use.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<ChunkedKVCache> from_tensors(const std::vector<at::Tensor>& tensors);
  // An independent copy.
  c10::intrusive_ptr<ChunkedKVCache> clone() const { return from_tensors(state_tensors()); }

 private:
  struct Layer {
    at::Tensor key;
    at::Tensor value;
    int64_t length = 0;
  };

  const Layer& layer_at(int64_t layer) const;
  at::Tensor rows_of(int64_t layer, at::Tensor Layer::*buffer) const;
  int64_t capacity_for(const Layer& layer, int64_t length) const;

  int64_t initial_capacity_;
  int64_t max_capacity_;
  std::vector<Layer> layers_;
};

}  // namespace h2o_prefill
