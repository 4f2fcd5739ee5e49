#include "h2o_prefill/memory_set_tracker.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "common/checkpoint.h"
#include "common/checks.h"
#include "common/config_fields.h"
#include "common/rules.h"
#include "common/tensors.h"
#include "core/state_header.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

// The pickled form begins with int64: K, then for every layer L, H, the most members of a set,
// whether it has scores, and where its last chunk began. Scores, memory and errors of the layers
// that have scores follow.
constexpr int64_t kTrackerHeaderFields = 1;

constexpr int64_t kTrackerLayerFields = 5;

void check_heads(const char* name, const at::Tensor& t, const at::Tensor& scores) {
  TORCH_CHECK_VALUE(t.sizes().slice(0, 2) == scores.sizes().slice(0, 2), name,
                    " must have batch and heads of scores ", scores.sizes(), ", got shape ",
                    t.sizes());
}

}  // namespace

MemorySetTracker::MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                                   int64_t sink_tokens)
    : MemorySetTracker(num_layers, PrefillConfig{.local_window = local_window,
                                                 .heavy_budget = heavy_budget,
                                                 .sink_tokens = sink_tokens}) {}

MemorySetTracker::MemorySetTracker(int64_t num_layers, const PrefillConfig& config,
                                   bool checkpoints)
    : sink_tokens_(config.sink_tokens),
      // What follows a dense tail depends on where its call ended.
      keeps_checkpoints_(checkpoints && config.dense_tail == 0) {
  check_num_layers(num_layers);
  config.check();
  for (int64_t i = 0; i < num_layers; ++i) {
    const PrefillConfig layer = config.of_layer(i);
    layers_.push_back({.local_window = layer.local_window,
                       .heavy_budget = layer.heavy_budget,
                       .memory_size = layer.memory_size()});
  }
}

const MemorySetTracker::Layer& MemorySetTracker::layer_at(int64_t layer) const {
  check_layer(layer, num_layers());
  return layers_[layer];
}

const MemorySetTracker::Layer& MemorySetTracker::scored_layer_at(int64_t layer) const {
  const Layer& state = layer_at(layer);
  TORCH_CHECK_VALUE(state.has_scores, "layer must have scores, layer ", layer, " has none");
  return state;
}

void MemorySetTracker::grow(int64_t layer, const at::Tensor& x, at::ScalarType type,
                            int64_t length) {
  const StateGuard guard;
  Layer& state = layers_[layer];
  const auto options = x.options().dtype(type);
  const bool fits = state.scores.defined() && state.scores.size(0) == x.size(0) &&
                    state.scores.size(1) == x.size(1) && state.scores.scalar_type() == type &&
                    state.scores.device() == x.device();
  if (!fits) {
    state.memory =
        at::full({x.size(0), x.size(1), memory_size(layer)}, -1, options.dtype(at::kInt));
    state.errors = no_errors(x);
    state.scores = at::zeros({x.size(0), x.size(1), length}, options);
  } else if (length > state.scores.size(2)) {
    auto larger =
        at::zeros({x.size(0), x.size(1), std::max(length, 2 * state.scores.size(2))}, options);
    larger.narrow(2, 0, state.length).copy_(state.scores.narrow(2, 0, state.length));
    state.scores = std::move(larger);
  }
}

void MemorySetTracker::init_chunk_scores(int64_t layer, int64_t chunk_begin,
                                         const at::Tensor& colsum) {
  const Layer& state = layer_at(layer);
  check_dims("colsum", colsum, 3);
  check_score_type("colsum", colsum);
  check_at_least("chunk_begin", chunk_begin, state.length);
  check_at_most("chunk_begin", chunk_begin, kMostScores);
  if (state.has_scores) {
    check_same_kind("colsum", colsum, state.scores, "the layer's scores");
    check_heads("colsum", colsum, state.scores);
  }
  const int64_t end = chunk_begin + colsum.size(2);
  grow(layer, colsum, colsum.scalar_type(), end);
  const StateGuard guard;
  state.scores.narrow(2, chunk_begin, colsum.size(2)).copy_(colsum);
  commit(layer, end, chunk_begin);
}

void MemorySetTracker::accumulate_memory_scores(int64_t layer, const at::Tensor& colsum) {
  const Layer& state = scored_layer_at(layer);
  check_dims("colsum", colsum, 3);
  check_same_kind("colsum", colsum, state.scores, "the layer's scores");
  TORCH_CHECK_VALUE(colsum.sizes() == state.memory.sizes(),
                    "colsum must have the shape of the memory set ", state.memory.sizes(), ", got ",
                    colsum.sizes());
  const at::NoGradGuard no_grad;
  auto scores = state.scores;
  accumulate_scores_(scores, state.memory, colsum);
}

at::Tensor MemorySetTracker::build_memory_set(int64_t layer, int64_t chunk_end) {
  const Layer& state = scored_layer_at(layer);
  check_at_least("chunk_end", chunk_end, state.length);
  check_at_most("chunk_end", chunk_end, kMostScores);
  grow(layer, state.scores, state.scores.scalar_type(), chunk_end);
  const StateGuard guard;
  const auto selected =
      select_memory(state.scores.narrow(2, 0, chunk_end), state.memory, state.last_chunk_begin,
                    chunk_end, state.local_window, state.heavy_budget, sink_tokens_);
  layers_[layer].memory =
      at::constant_pad_nd(selected, {0, state.memory_size - selected.size(2)}, -1);
  commit(layer, chunk_end, state.last_chunk_begin);
  return state.memory;
}

at::Tensor MemorySetTracker::indices(int64_t layer) const { return scored_layer_at(layer).memory; }

at::Tensor MemorySetTracker::scores(int64_t layer) const {
  const Layer& state = scored_layer_at(layer);
  return state.scores.narrow(2, 0, state.length);
}

at::Tensor MemorySetTracker::errors(int64_t layer) const { return scored_layer_at(layer).errors; }

PrefillState MemorySetTracker::state(int64_t layer) const {
  const Layer& state = layer_at(layer);
  if (!state.has_scores) return {};
  const StateGuard guard;
  return {.scores = scores(layer).clone(at::MemoryFormat::Contiguous),
          .memory = state.memory.clone(at::MemoryFormat::Contiguous),
          .last_chunk_begin = state.last_chunk_begin,
          .errors = state.errors.clone(at::MemoryFormat::Contiguous)};
}

void MemorySetTracker::clear(int64_t layer) {
  Layer& state = layers_[layer];
  state = {.local_window = state.local_window,
           .heavy_budget = state.heavy_budget,
           .memory_size = state.memory_size};
}

void MemorySetTracker::update(int64_t layer, const PrefillState& given) {
  rewind(layer, given);
  layers_[layer].checkpoints.clear();
}

void MemorySetTracker::rewind(int64_t layer, const PrefillState& given) {
  const auto& [scores, memory, last_chunk_begin, errors] = given;
  layer_at(layer);
  if (!scores.defined() && !memory.defined()) {
    clear(layer);
    return;
  }
  check_dims("scores", scores, 3);
  check_score_type("scores", scores);
  check_dims("memory", memory, 3);
  check_heads("memory", memory, scores);
  check_memory_sets("memory", memory, scores, scores.size(2));
  TORCH_CHECK_VALUE(memory.size(2) == memory_size(layer),
                    "memory must have room for K + L + H positions (", memory_size(layer),
                    "), got shape ", memory.sizes());
  check_between("last_chunk_begin", last_chunk_begin, 0, scores.size(2));
  if (errors.defined()) check_errors(errors, scores);
  const StateGuard guard;
  Layer& state = layers_[layer];
  state.scores = scores.clone(at::MemoryFormat::Contiguous);
  state.memory = memory.clone(at::MemoryFormat::Contiguous);
  state.errors =
      errors.defined() ? errors.clone(at::MemoryFormat::Contiguous) : no_errors(state.scores);
  state.has_scores = true;
  state.length = scores.size(2);
  state.last_chunk_begin = last_chunk_begin;
  state.checkpoints.erase(state.checkpoints.upper_bound(state.length), state.checkpoints.end());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> MemorySetTracker::reserve(int64_t layer,
                                                                         const at::Tensor& key,
                                                                         int64_t capacity) {
  const Layer& state = layer_at(layer);
  if (state.has_scores) {
    check_heads("key", key, state.scores);
    TORCH_CHECK_VALUE(
        state.scores.scalar_type() == accumulate_type(key) && state.scores.device() == key.device(),
        "key must fit the earlier calls, whose scores are ", dtype_name(state.scores.scalar_type()),
        " on ", state.scores.device(), ", got ", describe(key));
  }
  grow(layer, key, accumulate_type(key), capacity);
  return {state.scores, state.memory, state.errors};
}

void MemorySetTracker::commit(int64_t layer, int64_t length, int64_t last_chunk_begin) {
  layer_at(layer);
  Layer& state = layers_[layer];
  const int64_t capacity = state.scores.defined() ? state.scores.size(2) : 0;
  TORCH_CHECK_VALUE(state.scores.defined() && length >= state.length && length <= capacity,
                    "length must be in [", state.length, ", ", capacity, "], got ", length);
  state.has_scores = true;
  state.length = length;
  state.last_chunk_begin = last_chunk_begin;
}

void MemorySetTracker::truncate(int64_t length) {
  for (int64_t layer = 0; layer < num_layers(); ++layer) truncate_layer(layer, length);
}

void MemorySetTracker::truncate_layer(int64_t layer, int64_t length) {
  layer_at(layer);
  check_at_least("length", length, 0);
  Layer& state = layers_[layer];
  if (!state.has_scores || length >= state.length) return;
  const StateGuard guard;
  if (length == 0) {
    clear(layer);
    return;
  }
  StateBuffers buffers{state.scores, state.memory, state.errors};
  auto& kept = state.checkpoints;
  if (const auto found = kept.find(length); found != kept.end()) {
    const auto& [memory, scores, errors] = found->second;
    restore_(buffers, length, {.memory = memory, .scores = scores, .errors = errors});
    state.last_chunk_begin = length;
  } else {
    state.last_chunk_begin = cut_(buffers, length, state.length, state.last_chunk_begin);
  }
  state.length = length;
  kept.erase(kept.upper_bound(length), kept.end());
}

Checkpoints MemorySetTracker::reserve_checkpoints(int64_t layer, int64_t past,
                                                  int64_t count) const {
  const Layer& state = layer_at(layer);
  const bool follows = past == 0 || state.checkpoints.contains(past);
  if (!keeps_checkpoints_ || count == 0 || !follows) return {};
  const StateGuard guard;
  const auto like = [&](const at::Tensor& x, int64_t fields) {
    return at::empty({count, x.size(0), x.size(1), fields}, x.options());
  };
  return {.memory = like(state.memory, state.memory_size),
          .scores = like(state.scores, state.memory_size),
          .errors = like(state.errors, kErrorFields)};
}

Checkpoints MemorySetTracker::checkpoints(int64_t layer) const {
  std::vector<at::Tensor> memory, scores, errors;
  for (const auto& [length, x] : layer_at(layer).checkpoints) {
    memory.push_back(x.memory);
    scores.push_back(x.scores);
    errors.push_back(x.errors);
  }
  if (memory.empty()) return {};
  const auto sets = at::stack(memory);
  const int64_t width = sets.ge(0).sum(-1).max().item<int64_t>();
  return {.memory = sets.narrow(3, 0, width),
          .scores = at::stack(scores).narrow(3, 0, width),
          .errors = at::stack(errors)};
}

void MemorySetTracker::keep_checkpoints(int64_t layer, int64_t past, int64_t chunk_size,
                                        const Checkpoints& kept) {
  const int64_t size = memory_size(layer);
  if (!keeps_checkpoints_ || !kept.memory.defined()) return;
  const int64_t more = size - kept.memory.size(3);
  const auto memory = at::constant_pad_nd(kept.memory, {0, more}, -1);
  const auto scores = at::constant_pad_nd(kept.scores, {0, more});
  for (int64_t i = 0; i < memory.size(0); ++i) {
    layers_[layer].checkpoints.insert_or_assign(
        past + (i + 1) * chunk_size,
        Checkpoints{.memory = memory[i], .scores = scores[i], .errors = kept.errors[i]});
  }
}

int64_t MemorySetTracker::checkpoint_before(int64_t length) const {
  check_at_least("length", length, 0);
  const auto of_layer = [&](const Layer& layer) {
    if (!layer.has_scores || length >= layer.length) return length;
    return h2o_prefill::checkpoint_before(layer.checkpoints, length);
  };
  for (int64_t before = -1; length != before;) {
    before = length;
    for (const Layer& layer : layers_) length = std::min(length, of_layer(layer));
  }
  return length;
}

void MemorySetTracker::reset() { truncate(0); }

std::vector<at::Tensor> MemorySetTracker::state_tensors() const {
  std::vector<int64_t> header{sink_tokens_};
  std::vector<at::Tensor> tensors(1);
  for (int64_t i = 0; i < num_layers(); ++i) {
    const Layer& layer = layers_[i];
    header.insert(header.end(), {layer.local_window, layer.heavy_budget, layer.memory_size,
                                 layer.has_scores, layer.last_chunk_begin});
    if (!layer.has_scores) continue;
    const PrefillState copy = state(i);
    tensors.insert(tensors.end(), {copy.scores, copy.memory, copy.errors});
  }
  tensors[0] = at::tensor(header, at::kLong);
  return tensors;
}

c10::intrusive_ptr<MemorySetTracker> MemorySetTracker::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  StateReader state(tensors, kTrackerHeaderFields, kTrackerLayerFields);
  const int64_t sink_tokens = state.field(0);
  auto tracker = c10::make_intrusive<MemorySetTracker>(state.num_layers(),
                                                       PrefillConfig{.sink_tokens = sink_tokens});
  for (int64_t i = 0; i < state.num_layers(); ++i) {
    const int64_t* const fields = state.layer(i);
    const PrefillConfig config{
        .local_window = fields[0], .heavy_budget = fields[1], .sink_tokens = sink_tokens};
    config.check();
    check_between("the most members of a memory set", fields[2], config.memory_size(), kMostScores);
    tracker->layers_[i] = {
        .local_window = fields[0], .heavy_budget = fields[1], .memory_size = fields[2]};
    if (fields[3] == 0) continue;
    const at::Tensor* const held = state.take(3, "scores, memory and errors", i);
    tracker->update(
        i,
        {.scores = held[0], .memory = held[1], .last_chunk_begin = fields[4], .errors = held[2]});
  }
  state.check_end();
  return tracker;
}

}  // namespace h2o_prefill
