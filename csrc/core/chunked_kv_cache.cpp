#include "h2o_prefill/chunked_kv_cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "common/rules.h"
#include "core/state_header.h"

namespace h2o_prefill {
namespace {

// The pickled form begins with int64: initial_capacity, max_capacity, then length and capacity of
// every layer. Keys and values of the layers that have buffers follow.
constexpr int64_t kCacheHeaderFields = 2;
constexpr int64_t kCacheLayerFields = 2;

void check_new_tokens(const at::Tensor& key, const at::Tensor& value) {
  check_dims("key", key, 4);
  check_dims("value", value, 4);
  check_same_kind("value", value, key, "key");
  TORCH_CHECK_VALUE(key.sizes().slice(0, 3) == value.sizes().slice(0, 3),
                    "value must have batch, heads and length of key ", key.sizes(), ", got shape ",
                    value.sizes());
  check_inference_only("key", key);
  check_inference_only("value", value);
}

bool fits(const at::Tensor& buffer, const at::Tensor& t) {
  return buffer.size(0) == t.size(0) && buffer.size(1) == t.size(1) &&
         buffer.size(3) == t.size(3) && buffer.scalar_type() == t.scalar_type() &&
         buffer.device() == t.device();
}

void check_fits(const char* name, const at::Tensor& buffer, const at::Tensor& t, int64_t layer) {
  TORCH_CHECK_VALUE(fits(buffer, t), name, " must be like what layer ", layer, " holds, [",
                    buffer.size(0), ", ", buffer.size(1), ", *, ", buffer.size(3), "] ",
                    dtype_name(buffer.scalar_type()), " on ", buffer.device(), ", got ",
                    describe(t));
}

at::Tensor allocate(const at::Tensor& like, int64_t capacity) {
  return at::empty({like.size(0), like.size(1), capacity, like.size(3)}, like.options());
}

// A buffer of `capacity` rows that begins with the first `length` rows of another.
at::Tensor copy_rows(const at::Tensor& rows, int64_t length, int64_t capacity) {
  auto buffer = allocate(rows, capacity);
  buffer.narrow(2, 0, length).copy_(rows.narrow(2, 0, length));
  return buffer;
}

}  // namespace

ChunkedKVCache::ChunkedKVCache(int64_t num_layers, int64_t initial_capacity, int64_t max_capacity)
    : initial_capacity_(initial_capacity), max_capacity_(max_capacity) {
  check_num_layers(num_layers);
  check_at_least("initial_capacity", initial_capacity, 1);
  TORCH_CHECK_VALUE(max_capacity >= initial_capacity, "max_capacity must be >= initial_capacity (",
                    initial_capacity, "), got ", max_capacity);
  layers_.resize(num_layers);
}

const ChunkedKVCache::Layer& ChunkedKVCache::layer_at(int64_t layer) const {
  check_layer(layer, num_layers());
  return layers_[layer];
}

int64_t ChunkedKVCache::capacity(int64_t layer) const {
  const Layer& held = layer_at(layer);
  return held.key.defined() ? held.key.size(2) : 0;
}

int64_t ChunkedKVCache::capacity_for(const Layer& layer, int64_t length) const {
  const int64_t capacity = layer.key.defined() ? layer.key.size(2) : 0;
  if (length <= capacity) return capacity;
  return std::min(std::max({length, 2 * capacity, initial_capacity_}), max_capacity_);
}

std::tuple<at::Tensor, at::Tensor> ChunkedKVCache::reserve(int64_t layer, const at::Tensor& key,
                                                           const at::Tensor& value) {
  const Layer& held = layer_at(layer);
  check_new_tokens(key, value);
  if (held.length > 0) {
    check_fits("key", held.key, key, layer);
    check_fits("value", held.value, value, layer);
  }
  const int64_t past = held.length;
  const int64_t added = key.size(2);
  TORCH_CHECK_VALUE(added <= max_capacity_ - past, "max_capacity must be >= ", past + added,
                    ", the tokens of layer ", layer, " after this append, got ", max_capacity_);

  const StateGuard guard;
  Layer grown = held;
  const bool usable = held.key.defined() && fits(held.key, key) && fits(held.value, value);
  if (!usable) {
    grown = {};
    const int64_t capacity = capacity_for(grown, std::max<int64_t>(added, 1));
    grown.key = allocate(key, capacity);
    grown.value = allocate(value, capacity);
  } else if (const int64_t capacity = capacity_for(held, past + added);
             capacity > held.key.size(2)) {
    grown.key = copy_rows(held.key, past, capacity);
    grown.value = copy_rows(held.value, past, capacity);
  }
  layers_[layer] = std::move(grown);
  return {layers_[layer].key, layers_[layer].value};
}

void ChunkedKVCache::commit(int64_t layer, int64_t num_tokens) {
  const Layer& held = layer_at(layer);
  TORCH_CHECK_VALUE(num_tokens >= 0 && num_tokens <= capacity(layer) - held.length,
                    "num_tokens must be in [0, ", capacity(layer) - held.length,
                    "], the room that is reserved after the tokens of layer ", layer, ", got ",
                    num_tokens);
  layers_[layer].length += num_tokens;
}

std::tuple<at::Tensor, at::Tensor> ChunkedKVCache::append(int64_t layer, const at::Tensor& key,
                                                          const at::Tensor& value) {
  const auto [keys, values] = reserve(layer, key, value);
  const int64_t past = length(layer);
  const int64_t added = key.size(2);
  const StateGuard guard;
  keys.narrow(2, past, added).copy_(key);
  values.narrow(2, past, added).copy_(value);
  commit(layer, added);
  return {keys.narrow(2, 0, past + added), values.narrow(2, 0, past + added)};
}

at::Tensor ChunkedKVCache::rows_of(int64_t layer, at::Tensor Layer::*buffer) const {
  const Layer& held = layer_at(layer);
  TORCH_CHECK_VALUE(held.length > 0, "layer must hold tokens, layer ", layer, " has none");
  return (held.*buffer).narrow(2, 0, held.length);
}

at::Tensor ChunkedKVCache::key(int64_t layer) const { return rows_of(layer, &Layer::key); }
at::Tensor ChunkedKVCache::value(int64_t layer) const { return rows_of(layer, &Layer::value); }

void ChunkedKVCache::truncate(int64_t length) {
  for (int64_t layer = 0; layer < num_layers(); ++layer) truncate_layer(layer, length);
}

void ChunkedKVCache::truncate_layer(int64_t layer, int64_t length) {
  check_layer(layer, num_layers());
  check_at_least("length", length, 0);
  layers_[layer].length = std::min(layers_[layer].length, length);
}

void ChunkedKVCache::reset() { truncate(0); }

std::vector<at::Tensor> ChunkedKVCache::state_tensors() const {
  std::vector<int64_t> header{initial_capacity_, max_capacity_};
  std::vector<at::Tensor> tensors(1);
  for (const Layer& layer : layers_) {
    header.push_back(layer.length);
    header.push_back(layer.key.defined() ? layer.key.size(2) : 0);
    if (!layer.key.defined()) continue;
    tensors.push_back(copy_rows(layer.key, layer.length, layer.length));
    tensors.push_back(copy_rows(layer.value, layer.length, layer.length));
  }
  tensors[0] = at::tensor(header, at::kLong);
  return tensors;
}

c10::intrusive_ptr<ChunkedKVCache> ChunkedKVCache::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  StateReader state(tensors, kCacheHeaderFields, kCacheLayerFields);
  auto cache =
      c10::make_intrusive<ChunkedKVCache>(state.num_layers(), state.field(0), state.field(1));
  const StateGuard guard;
  for (int64_t i = 0; i < state.num_layers(); ++i) {
    const int64_t length = state.layer(i)[0];
    const int64_t capacity = state.layer(i)[1];
    TORCH_CHECK_VALUE(0 <= length && length <= capacity && capacity <= cache->max_capacity_,
                      "tensors must be a state of ChunkedKVCache, got length ", length,
                      " and capacity ", capacity, " for layer ", i);
    if (capacity == 0) continue;
    const at::Tensor* const of_layer = state.take(2, "key and value", i);
    const at::Tensor &key = of_layer[0], &value = of_layer[1];
    check_new_tokens(key, value);
    TORCH_CHECK_VALUE(key.size(2) == length, "tensors must hold ", length, " tokens of layer ", i,
                      ", got ", key.size(2));
    cache->layers_[i] = {copy_rows(key, length, capacity), copy_rows(value, length, capacity),
                         length};
  }
  state.check_end();
  return cache;
}

}  // namespace h2o_prefill
