#include "h2o_prefill/memory_set_tracker.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <utility>

#include "common/checks.h"
#include "common/config_fields.h"
#include "common/rules.h"
#include "core/state_header.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

MemorySetTracker::MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                                   int64_t sink_tokens)
    : MemorySetTracker(num_layers, PrefillConfig{.local_window = local_window,
                                                 .heavy_budget = heavy_budget,
                                                 .sink_tokens = sink_tokens}) {}

MemorySetTracker::MemorySetTracker(int64_t num_layers, const PrefillConfig& config)
    : MemorySetTracker(empty_layers(num_layers), config) {}

MemorySetTracker::MemorySetTracker(LayerStates layers, const PrefillConfig& config)
    : layers_(std::move(layers)),
      local_window_(config.local_window),
      heavy_budget_(config.heavy_budget),
      sink_tokens_(config.sink_tokens) {
  config.check();  // first: budgets beyond its bounds overflow in memory_size()
  first_memory_size_ = config.of_layer(0).memory_size();
  memory_size_ = config.of_layer(1).memory_size();
}

const c10::intrusive_ptr<LayerState>& MemorySetTracker::layer(int64_t layer) const {
  check_layer(layer, num_layers());
  return layers_[layer];
}

LayerState& MemorySetTracker::scored(int64_t layer) const {
  LayerState& state = *this->layer(layer);
  TORCH_CHECK_VALUE(state.has_scores(), "layer must have scores, layer ", layer, " has none");
  return state;
}

void MemorySetTracker::init_chunk_scores(int64_t layer, int64_t chunk_begin,
                                         const at::Tensor& colsum) {
  LayerState& state = *this->layer(layer);
  check_dims("colsum", colsum, 3);
  check_score_type("colsum", colsum);
  check_at_least("chunk_begin", chunk_begin, state.scored());
  check_at_most("chunk_begin", chunk_begin, kMostScores);
  if (state.has_scores()) {
    check_same_kind("colsum", colsum, state.scores_, "the layer's scores");
    TORCH_CHECK_VALUE(colsum.sizes().slice(0, 2) == state.scores_.sizes().slice(0, 2),
                      "colsum must have batch and heads of scores ", state.scores().sizes(),
                      ", got shape ", colsum.sizes());
  }
  const int64_t end = chunk_begin + colsum.size(2);
  state.reserve(colsum, end, memory_size(layer));
  const StateGuard guard;
  state.scores_.narrow(2, chunk_begin, colsum.size(2)).copy_(colsum);
  state.scored_ = end;
  state.last_chunk_begin_ = chunk_begin;
}

void MemorySetTracker::accumulate_memory_scores(int64_t layer, const at::Tensor& colsum) {
  LayerState& state = scored(layer);
  check_dims("colsum", colsum, 3);
  check_same_kind("colsum", colsum, state.scores_, "the layer's scores");
  TORCH_CHECK_VALUE(colsum.sizes() == state.memory_.sizes(),
                    "colsum must have the shape of the memory set ", state.memory_.sizes(),
                    ", got ", colsum.sizes());
  const at::NoGradGuard no_grad;
  accumulate_scores_(state.scores_, state.memory_, colsum);
}

at::Tensor MemorySetTracker::build_memory_set(int64_t layer, int64_t chunk_end) {
  LayerState& state = scored(layer);
  check_at_least("chunk_end", chunk_end, state.scored());
  check_at_most("chunk_end", chunk_end, kMostScores);
  state.reserve(state.scores_, chunk_end, memory_size(layer));
  const StateGuard guard;
  const auto selected =
      select_memory(state.scores_.narrow(2, 0, chunk_end), state.memory_, state.last_chunk_begin_,
                    chunk_end, local_window_, heavy_budget_, sink_tokens_);
  state.memory_ = at::constant_pad_nd(selected, {0, memory_size(layer) - selected.size(2)}, -1);
  state.scored_ = chunk_end;
  return state.memory_;
}

void MemorySetTracker::update(int64_t layer, const PrefillState& state) {
  LayerState& updated = *this->layer(layer);
  check_dims("memory", state.memory, 3);
  TORCH_CHECK_VALUE(state.memory.size(2) == memory_size(layer),
                    "memory must have room for K + L + H positions (", memory_size(layer),
                    "), got shape ", state.memory.sizes());
  updated.set_scores(state);
}

void MemorySetTracker::truncate(int64_t length) { h2o_prefill::truncate(layers_, length); }

int64_t MemorySetTracker::checkpoint_before(int64_t length) const {
  return h2o_prefill::checkpoint_before(layers_, length);
}

std::vector<at::Tensor> MemorySetTracker::state_tensors() const {
  return tensors_of({local_window_, heavy_budget_, sink_tokens_, first_memory_size_, memory_size_},
                    layers_);
}

c10::intrusive_ptr<MemorySetTracker> MemorySetTracker::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  StateReader state(tensors, /*fields=*/5, /*record_fields=*/1);
  const PrefillConfig config{.local_window = state.field(0),
                             .heavy_budget = state.field(1),
                             .sink_tokens = state.field(2)};
  auto tracker = c10::make_intrusive<MemorySetTracker>(layers_of(state), config);
  for (const int64_t size : {state.field(3), state.field(4)}) {
    check_between("the most members of a memory set", size, config.memory_size(), kMostScores);
  }
  tracker->first_memory_size_ = state.field(3);
  tracker->memory_size_ = state.field(4);
  return tracker;
}

}  // namespace h2o_prefill
