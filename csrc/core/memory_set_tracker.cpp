#include "h2o_prefill/memory_set_tracker.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include "core/arguments.h"
#include "core/state_header.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

// The pickled form begins with int64: L, H, K, then for every layer whether it has scores and where
// its last chunk began. Scores and memory of the layers that have scores follow.
constexpr int64_t kHeaderFields = 3;
constexpr int64_t kLayerFields = 2;

// Scores of positions before `length`, 0 where there was none.
at::Tensor extend(const at::Tensor& scores, int64_t length) {
  return length == scores.size(2) ? scores
                                  : at::constant_pad_nd(scores, {0, length - scores.size(2)});
}

void check_score_type(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, name,
                    " must be float32 or float64, got ", t.scalar_type());
}

void check_heads(const char* name, const at::Tensor& t, const at::Tensor& scores) {
  TORCH_CHECK_VALUE(t.sizes().slice(0, 2) == scores.sizes().slice(0, 2), name,
                    " must have batch and heads of scores ", scores.sizes(), ", got shape ",
                    t.sizes());
}

}  // namespace

MemorySetTracker::MemorySetTracker(int64_t num_layers, int64_t local_window, int64_t heavy_budget,
                                   int64_t sink_tokens)
    : local_window_(local_window), heavy_budget_(heavy_budget), sink_tokens_(sink_tokens) {
  check_at_least("num_layers", num_layers, 1);
  check_at_least("local_window", local_window, 0);
  check_at_least("heavy_budget", heavy_budget, 0);
  check_at_least("sink_tokens", sink_tokens, 0);
  layers_.resize(num_layers);
}

const MemorySetTracker::Layer& MemorySetTracker::layer_at(int64_t layer) const {
  check_layer(layer, num_layers());
  return layers_[layer];
}

const MemorySetTracker::Layer& MemorySetTracker::scored_layer_at(int64_t layer) const {
  const Layer& state = layer_at(layer);
  TORCH_CHECK_VALUE(state.scores.defined(), "layer must have scores, layer ", layer, " has none");
  return state;
}

void MemorySetTracker::init_chunk_scores(int64_t layer, int64_t chunk_begin,
                                         const at::Tensor& colsum) {
  Layer next = layer_at(layer);
  check_dims("colsum", colsum, 3);
  check_score_type("colsum", colsum);
  const int64_t scored = next.scores.defined() ? next.scores.size(2) : 0;
  check_at_least("chunk_begin", chunk_begin, scored);
  if (next.scores.defined()) {
    check_same_kind("colsum", colsum, next.scores, "the layer's scores");
    check_heads("colsum", colsum, next.scores);
    next.scores = at::cat({extend(next.scores, chunk_begin), colsum}, 2);
  } else {
    next.scores = at::constant_pad_nd(colsum, {chunk_begin, 0});
    next.memory = at::full({colsum.size(0), colsum.size(1), memory_size()}, -1,
                           colsum.options().dtype(at::kInt));
  }
  next.last_chunk_begin = chunk_begin;
  layers_[layer] = std::move(next);
}

void MemorySetTracker::accumulate_memory_scores(int64_t layer, const at::Tensor& colsum) {
  const Layer& state = scored_layer_at(layer);
  check_dims("colsum", colsum, 3);
  check_same_kind("colsum", colsum, state.scores, "the layer's scores");
  TORCH_CHECK_VALUE(colsum.sizes() == state.memory.sizes(),
                    "colsum must have the shape of the memory set ", state.memory.sizes(), ", got ",
                    colsum.sizes());
  // An absent entry adds nothing; position 0 stands in for it. Only a layer that no position was
  // ever scored in has no position 0, and its set is empty.
  if (state.scores.size(2) == 0) return;
  const auto absent = state.memory.lt(0);
  layers_[layer].scores = state.scores.scatter_add(2, state.memory.clamp_min(0).to(at::kLong),
                                                   colsum.masked_fill(absent, 0));
}

at::Tensor MemorySetTracker::build_memory_set(int64_t layer, int64_t chunk_end) {
  Layer next = scored_layer_at(layer);
  check_at_least("chunk_end", chunk_end, next.scores.size(2));
  next.scores = extend(next.scores, chunk_end);
  next.memory = select_memory(next.scores, next.memory, next.last_chunk_begin, chunk_end,
                              local_window_, heavy_budget_, sink_tokens_);
  layers_[layer] = std::move(next);
  return layers_[layer].memory;
}

at::Tensor MemorySetTracker::indices(int64_t layer) const { return scored_layer_at(layer).memory; }

at::Tensor MemorySetTracker::scores(int64_t layer) const { return scored_layer_at(layer).scores; }

bool MemorySetTracker::has_scores(int64_t layer) const { return layer_at(layer).scores.defined(); }

int64_t MemorySetTracker::last_chunk_begin(int64_t layer) const {
  return layer_at(layer).last_chunk_begin;
}

void MemorySetTracker::check_layer_tensors(const at::Tensor& scores, const at::Tensor& memory,
                                           int64_t last_chunk_begin) const {
  check_dims("scores", scores, 3);
  check_score_type("scores", scores);
  check_dims("memory", memory, 3);
  TORCH_CHECK_VALUE(memory.scalar_type() == at::kInt && memory.device() == scores.device(),
                    "memory must be int32 on the device of scores (", scores.device(), "), got ",
                    memory.scalar_type(), " on ", memory.device());
  check_heads("memory", memory, scores);
  TORCH_CHECK_VALUE(memory.size(2) == memory_size(),
                    "memory must have room for K + L + H positions (", memory_size(),
                    "), got shape ", memory.sizes());
  TORCH_CHECK_VALUE(last_chunk_begin >= 0 && last_chunk_begin <= scores.size(2),
                    "last_chunk_begin must be in [0, ", scores.size(2), "], got ",
                    last_chunk_begin);
}

void MemorySetTracker::update(int64_t layer, const at::Tensor& scores, const at::Tensor& memory,
                              int64_t last_chunk_begin) {
  check_layer(layer, num_layers());
  check_layer_tensors(scores, memory, last_chunk_begin);
  layers_[layer] = {scores, memory, last_chunk_begin};
}

void MemorySetTracker::reset() { layers_.assign(layers_.size(), Layer{}); }

std::vector<at::Tensor> MemorySetTracker::state_tensors() const {
  std::vector<int64_t> header{local_window_, heavy_budget_, sink_tokens_};
  std::vector<at::Tensor> tensors(1);
  for (const Layer& layer : layers_) {
    header.push_back(layer.scores.defined());
    header.push_back(layer.last_chunk_begin);
    if (!layer.scores.defined()) continue;
    tensors.push_back(layer.scores.clone(at::MemoryFormat::Contiguous));
    tensors.push_back(layer.memory.clone(at::MemoryFormat::Contiguous));
  }
  tensors[0] = at::tensor(header, at::kLong);
  return tensors;
}

c10::intrusive_ptr<MemorySetTracker> MemorySetTracker::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  const auto header = read_header(tensors, kHeaderFields, kLayerFields);
  const int64_t num_layers = (static_cast<int64_t>(header.size()) - kHeaderFields) / kLayerFields;
  auto tracker = c10::make_intrusive<MemorySetTracker>(num_layers, header[0], header[1], header[2]);
  size_t next = 1;
  for (int64_t i = 0; i < num_layers; ++i) {
    const bool scored = header[kHeaderFields + i * kLayerFields] != 0;
    if (!scored) continue;
    TORCH_CHECK_VALUE(next + 1 < tensors.size(), "tensors must hold scores and memory of layer ", i,
                      ", got ", tensors.size(), " tensors");
    const auto scores = tensors[next++].clone(at::MemoryFormat::Contiguous);
    const auto memory = tensors[next++].clone(at::MemoryFormat::Contiguous);
    tracker->update(i, scores, memory, header[kHeaderFields + i * kLayerFields + 1]);
  }
  TORCH_CHECK_VALUE(next == tensors.size(), "tensors must end behind the last layer, got ",
                    tensors.size() - next, " more");
  return tracker;
}

}  // namespace h2o_prefill
