// Preallocated keys and values of every layer of one prompt.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <tuple>
#include <vector>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Keys and values live in separate buffers [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv] per layer, allocated at the
// first append with the dtype and device of what is appended. A buffer that is full grows by doubling, up to
// max_capacity tokens; beyond that append throws and changes nothing.
class H2O_API ChunkedKVCache : public torch::CustomClassHolder {
 public:
  // initial_capacity: tokens that the first allocation holds; max_capacity: tokens that a layer may hold at most.
  ChunkedKVCache(int64_t num_layers, int64_t initial_capacity, int64_t max_capacity);

  // Appends key [B, Hkv, T, D] and value [B, Hkv, T, Dv] to a layer. Returns views of the whole history,
  // [B, Hkv, length, D] and [B, Hkv, length, Dv]; they stay valid until the next append that grows the buffers.
  std::tuple<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& key, const at::Tensor& value);

  // Views of what a layer holds, [B, Hkv, length, *]. Throws if nothing was appended yet.
  at::Tensor key(int64_t layer) const;
  at::Tensor value(int64_t layer) const;

  int64_t num_layers() const;
  int64_t length(int64_t layer) const;
  int64_t capacity(int64_t layer) const;
  int64_t max_capacity() const { return max_capacity_; }

  // Drops every token behind the first `length` of every layer that is longer.
  void truncate(int64_t length);

  // Forgets all tokens; the buffers stay allocated.
  void reset();

  // Everything as plain tensors, and back: the pickled form.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<ChunkedKVCache> from_tensors(const std::vector<at::Tensor>& tensors);

 private:
  struct Layer {
    at::Tensor key;
    at::Tensor value;
    int64_t length = 0;
  };

  const Layer& layer_at(int64_t layer) const;
  void reserve(Layer& layer, int64_t length, const at::Tensor& key, const at::Tensor& value) const;

  int64_t initial_capacity_;
  int64_t max_capacity_;
  std::vector<Layer> layers_;
};

}  // namespace h2o_prefill
