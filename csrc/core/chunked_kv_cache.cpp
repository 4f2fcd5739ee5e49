#include "h2o_prefill/chunked_kv_cache.h"

#include "common/rules.h"
#include "core/state_header.h"

namespace h2o_prefill {

ChunkedKVCache::ChunkedKVCache(int64_t num_layers, int64_t initial_capacity, int64_t max_capacity)
    : ChunkedKVCache(
          empty_layers(num_layers, /*checkpoints=*/false, initial_capacity, max_capacity)) {}

const c10::intrusive_ptr<LayerState>& ChunkedKVCache::state(int64_t layer) const {
  check_layer(layer, num_layers());
  return layers_[layer];
}

const LayerState& ChunkedKVCache::filled(int64_t layer) const {
  const LayerState& filled = *state(layer);
  TORCH_CHECK_VALUE(filled.length() > 0, "layer must hold tokens, layer ", layer, " has none");
  return filled;
}

void ChunkedKVCache::truncate(int64_t length) { h2o_prefill::truncate(layers_, length); }

std::vector<at::Tensor> ChunkedKVCache::state_tensors() const { return tensors_of({}, layers_); }

c10::intrusive_ptr<ChunkedKVCache> ChunkedKVCache::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  StateReader state(tensors, /*fields=*/0, /*record_fields=*/1);
  return c10::make_intrusive<ChunkedKVCache>(layers_of(state));
}

c10::intrusive_ptr<ChunkedKVCache> ChunkedKVCache::clone() const {
  return c10::make_intrusive<ChunkedKVCache>(cloned(layers_));
}

}  // namespace h2o_prefill
