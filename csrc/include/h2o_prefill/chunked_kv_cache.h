// Keys and values of every layer, for one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <tuple>
#include <utility>
#include <vector>

#include "h2o_prefill/export.h"
#include "h2o_prefill/layer_state.h"

namespace h2o_prefill {

// The keys and values of layers: see LayerState. Buffers are allocated at the first append with the
// shape, dtype and device of its arguments, which later appends must match while the layer holds
// tokens. A full buffer grows by doubling, up to max_capacity tokens; beyond that append throws. An
// append that throws changes nothing. For inference: a key or value that requires a gradient while
// gradients are on is an error.
class H2O_API ChunkedKVCache : public torch::CustomClassHolder {
 public:
  // initial_capacity: capacity of the first allocation, in tokens; max_capacity: maximum number of
  // tokens of a layer.
  ChunkedKVCache(int64_t num_layers, int64_t initial_capacity, int64_t max_capacity);

  // A view of these layers.
  explicit ChunkedKVCache(std::vector<c10::intrusive_ptr<LayerState>> layers)
      : layers_(std::move(layers)) {}

  // There are no implicit copies, which would share buffers.
  ChunkedKVCache& operator=(ChunkedKVCache&&) = delete;

  // Appends key [B, Hkv, T, D] and value [B, Hkv, T, Dv] to a layer. Returns views of the whole
  // history, [B, Hkv, length, D] and [B, Hkv, length, Dv]. Later appends do not change their
  // contents, unless truncate() came first.
  std::tuple<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& key,
                                            const at::Tensor& value) {
    return state(layer)->append(key, value);
  }

  // Views of a layer's keys and values, [B, Hkv, length, *]. Throws if it holds no token.
  at::Tensor key(int64_t layer) const { return filled(layer).key(); }
  at::Tensor value(int64_t layer) const { return filled(layer).value(); }

  const c10::intrusive_ptr<LayerState>& state(int64_t layer) const;
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t length(int64_t layer) const { return state(layer)->length(); }
  int64_t initial_capacity() const { return layers_[0]->initial_capacity(); }
  int64_t max_capacity() const { return layers_[0]->max_capacity(); }

  // Capacity of a layer's buffers in tokens; 0 before its first append.
  int64_t capacity(int64_t layer) const { return state(layer)->capacity(); }

  // Removes the tokens after the first `length` of all layers.
  void truncate(int64_t length);

  // Removes all tokens; the buffers stay allocated.
  void reset() { truncate(0); }

  // The pickled form: plain tensors.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<ChunkedKVCache> from_tensors(const std::vector<at::Tensor>& tensors);
  // An independent copy.
  c10::intrusive_ptr<ChunkedKVCache> clone() const;

 private:
  const LayerState& filled(int64_t layer) const;

  std::vector<c10::intrusive_ptr<LayerState>> layers_;
};

}  // namespace h2o_prefill
