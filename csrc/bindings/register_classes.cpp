// The classes as torch.classes.h2o_prefill.*, for Python and TorchScript.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "h2o_prefill/chunk_manager.h"
#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/chunked_sparse_attention.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/memory_set_tracker.h"

namespace h2o_prefill {
namespace {

using torch::arg;

// A registered class is held by reference count, which the plain aggregate is not.
struct ConfigHolder : torch::CustomClassHolder {
  explicit ConfigHolder(PrefillConfig settings) : config(std::move(settings)) { config.validate(); }
  const PrefillConfig config;
};
using Config = c10::intrusive_ptr<ConfigHolder>;
using Chunks = c10::intrusive_ptr<ChunkManager>;
using Cache = c10::intrusive_ptr<ChunkedKVCache>;
using Tracker = c10::intrusive_ptr<MemorySetTracker>;
using Attention = c10::intrusive_ptr<ChunkedSparseAttention>;

// The pickled form of PrefillConfig: its numbers in order, min_prefill 0 for none, then
// dense_layers and gqa_reduce.
using ConfigState = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::string>;

ConfigState to_state(const PrefillConfig& c) {
  return {{c.chunk_size, c.local_window, c.heavy_budget, c.sink_tokens, c.dense_tail,
           c.min_prefill.value_or(0), c.recall_block},
          c.dense_layers,
          c.gqa_reduce};
}

PrefillConfig from_state(const ConfigState& state) {
  const auto& [numbers, dense_layers, gqa_reduce] = state;
  TORCH_CHECK_VALUE(numbers.size() == 7, "state must hold the 7 numbers of a PrefillConfig, got ",
                    numbers.size());
  const auto min_prefill = numbers[5] == 0 ? std::nullopt : std::optional<int64_t>(numbers[5]);
  return {numbers[0],   numbers[1], numbers[2],  numbers[3], numbers[4],
          dense_layers, gqa_reduce, min_prefill, numbers[6]};
}

// A read-only attribute for each field.
template <typename Field>
void add_field(torch::class_<ConfigHolder>& cls, const char* name, Field PrefillConfig::* field) {
  cls.def_property(name, [field](const Config& self) { return self->config.*field; });
}

void register_config(torch::Library& m) {
  const PrefillConfig defaults;
  auto cls = m.class_<ConfigHolder>("PrefillConfig");
  cls.def(torch::init([](int64_t chunk_size, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens, int64_t dense_tail, std::vector<int64_t> dense_layers,
                         std::string gqa_reduce, std::optional<int64_t> min_prefill,
                         int64_t recall_block) {
            return c10::make_intrusive<ConfigHolder>(PrefillConfig{
                chunk_size, local_window, heavy_budget, sink_tokens, dense_tail,
                std::move(dense_layers), std::move(gqa_reduce), min_prefill, recall_block});
          }),
          "Settings of one sparse prefill; see h2o_prefill.PrefillConfig for the meaning of each.",
          {arg("chunk_size") = defaults.chunk_size, arg("local_window") = defaults.local_window,
           arg("heavy_budget") = defaults.heavy_budget, arg("sink_tokens") = defaults.sink_tokens,
           arg("dense_tail") = defaults.dense_tail, arg("dense_layers") = defaults.dense_layers,
           arg("gqa_reduce") = defaults.gqa_reduce, arg("min_prefill") = defaults.min_prefill,
           arg("recall_block") = defaults.recall_block});
  add_field(cls, "chunk_size", &PrefillConfig::chunk_size);
  add_field(cls, "local_window", &PrefillConfig::local_window);
  add_field(cls, "heavy_budget", &PrefillConfig::heavy_budget);
  add_field(cls, "sink_tokens", &PrefillConfig::sink_tokens);
  add_field(cls, "dense_tail", &PrefillConfig::dense_tail);
  add_field(cls, "dense_layers", &PrefillConfig::dense_layers);
  add_field(cls, "gqa_reduce", &PrefillConfig::gqa_reduce);
  add_field(cls, "min_prefill", &PrefillConfig::min_prefill);
  add_field(cls, "recall_block", &PrefillConfig::recall_block);
  cls.def(
         "memory_size", [](const Config& self) { return self->config.memory_size(); },
         "Return the positions that a memory set holds at most: K + L + H.")
      .def(
          "sparse_from", [](const Config& self) { return self->config.sparse_from(); },
          "Return the number of new tokens from which on a call is sparse.")
      .def("is_dense_layer",
           [](const Config& self, int64_t layer) { return self->config.is_dense_layer(layer); },
           "Return whether a layer stays dense.", {arg("layer")})
      .def_pickle([](const Config& self) { return to_state(self->config); },
                  [](const ConfigState& state) {
                    return c10::make_intrusive<ConfigHolder>(from_state(state));
                  });
}

void register_chunk_manager(torch::Library& m) {
  m.class_<ChunkManager>("ChunkManager")
      .def(torch::init<int64_t, int64_t, int64_t>(),
           "The chunks of one call, in absolute positions.",
           {arg("past"), arg("num_tokens"), arg("chunk_size")})
      .def("past", &ChunkManager::past, "Return the tokens before the call.")
      .def("num_tokens", &ChunkManager::num_tokens, "Return the tokens of the call.")
      .def("chunk_size", &ChunkManager::chunk_size, "Return S.")
      .def("num_chunks", &ChunkManager::num_chunks, "Return the number of chunks.")
      .def("begin", &ChunkManager::begin, "Return the first position of a chunk.", {arg("chunk")})
      .def("end", &ChunkManager::end, "Return the position behind the last of a chunk.",
           {arg("chunk")})
      .def("last_chunk_begin", &ChunkManager::last_chunk_begin,
           "Return where the last chunk begins; `past` for a call without tokens.")
      .def_pickle(
          [](const Chunks& self) {
            return std::make_tuple(self->past(), self->num_tokens(), self->chunk_size());
          },
          [](std::tuple<int64_t, int64_t, int64_t> state) {
            const auto [past, num_tokens, chunk_size] = state;
            return c10::make_intrusive<ChunkManager>(past, num_tokens, chunk_size);
          });
}

void register_cache(torch::Library& m) {
  m.class_<ChunkedKVCache>("ChunkedKVCache")
      .def(torch::init<int64_t, int64_t, int64_t>(),
           "Preallocated keys and values of every layer of one prompt; grows by doubling up to "
           "max_capacity tokens.",
           {arg("num_layers"), arg("initial_capacity"), arg("max_capacity")})
      .def("append", &ChunkedKVCache::append,
           "Append key [B, Hkv, T, D] and value [B, Hkv, T, Dv] to a layer; return views of all it "
           "holds.",
           {arg("layer"), arg("key"), arg("value")})
      .def("key", &ChunkedKVCache::key, "Return a view of a layer's keys, [B, Hkv, length, D].",
           {arg("layer")})
      .def("value", &ChunkedKVCache::value,
           "Return a view of a layer's values, [B, Hkv, length, Dv].", {arg("layer")})
      .def("num_layers", &ChunkedKVCache::num_layers, "Return the number of layers.")
      .def("length", &ChunkedKVCache::length, "Return the tokens that a layer holds.",
           {arg("layer")})
      .def("capacity", &ChunkedKVCache::capacity,
           "Return the tokens that a layer's buffers have room for.", {arg("layer")})
      .def("initial_capacity", &ChunkedKVCache::initial_capacity,
           "Return the tokens of the first allocation.")
      .def("max_capacity", &ChunkedKVCache::max_capacity,
           "Return the tokens that a layer may hold at most.")
      .def("truncate", &ChunkedKVCache::truncate,
           "Drop every token behind the first `length` of every layer.", {arg("length")})
      .def("truncate_layer", &ChunkedKVCache::truncate_layer,
           "Drop every token behind the first `length` of a layer.", {arg("layer"), arg("length")})
      .def("reset", &ChunkedKVCache::reset, "Forget all tokens; the buffers stay allocated.")
      .def("state_tensors", &ChunkedKVCache::state_tensors,
           "Return everything as plain tensors: copies.")
      .def_static("from_tensors", &ChunkedKVCache::from_tensors,
                  "Build a cache from what state_tensors returned.")
      .def_pickle([](const Cache& self) { return self->state_tensors(); },
                  [](const std::vector<at::Tensor>& tensors) {
                    return ChunkedKVCache::from_tensors(tensors);
                  });
}

void register_tracker(torch::Library& m) {
  m.class_<MemorySetTracker>("MemorySetTracker")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t>(),
           "Scores and memory set of every layer of one prompt.",
           {arg("num_layers"), arg("local_window"), arg("heavy_budget"), arg("sink_tokens") = 0})
      .def("init_chunk_scores", &MemorySetTracker::init_chunk_scores,
           "Set the scores of a new chunk to the column sums of phase 1, [B, Hkv, T].",
           {arg("layer"), arg("chunk_begin"), arg("colsum")})
      .def("accumulate_memory_scores", &MemorySetTracker::accumulate_memory_scores,
           "Add the column sums of phase 2, [B, Hkv, M], to the scores of the memory set.",
           {arg("layer"), arg("colsum")})
      .def("build_memory_set", &MemorySetTracker::build_memory_set,
           "Build the set that the chunk after chunk_end attends to; return it, int32 [B, Hkv, K + "
           "L + H].",
           {arg("layer"), arg("chunk_end")})
      .def("indices", &MemorySetTracker::indices,
           "Return a layer's memory set, int32 [B, Hkv, K + L + H].", {arg("layer")})
      .def("scores", &MemorySetTracker::scores, "Return a layer's scores, [B, Hkv, length].",
           {arg("layer")})
      .def("has_scores", &MemorySetTracker::has_scores, "Return whether a layer has scores.",
           {arg("layer")})
      .def("num_layers", &MemorySetTracker::num_layers, "Return the number of layers.")
      .def("memory_size", &MemorySetTracker::memory_size, "Return K + L + H.")
      .def("local_window", &MemorySetTracker::local_window, "Return L.")
      .def("heavy_budget", &MemorySetTracker::heavy_budget, "Return H.")
      .def("sink_tokens", &MemorySetTracker::sink_tokens, "Return K.")
      .def("last_chunk_begin", &MemorySetTracker::last_chunk_begin,
           "Return where the last chunk of a layer began.", {arg("layer")})
      .def("update", &MemorySetTracker::update,
           "Replace the state of a layer by what chunked_sparse_attention returned.",
           {arg("layer"), arg("scores"), arg("memory"), arg("last_chunk_begin")})
      .def("reset", &MemorySetTracker::reset, "Forget every layer.")
      .def("state_tensors", &MemorySetTracker::state_tensors,
           "Return everything as plain tensors: copies.")
      .def_static("from_tensors", &MemorySetTracker::from_tensors,
                  "Build a tracker from what state_tensors returned.")
      .def_pickle([](const Tracker& self) { return self->state_tensors(); },
                  [](const std::vector<at::Tensor>& tensors) {
                    return MemorySetTracker::from_tensors(tensors);
                  });
}

void register_attention(torch::Library& m) {
  m.class_<ChunkedSparseAttention>("ChunkedSparseAttention")
      .def(torch::init([](const Config& config) {
             return c10::make_intrusive<ChunkedSparseAttention>(config->config);
           }),
           "Attention of one model under chunked sparse prefill; holds the settings only.",
           {arg("config")})
      .def("forward",
           [](const Attention& self, int64_t layer, const at::Tensor& query, const at::Tensor& key,
              const at::Tensor& value, const Cache& cache, const Tracker& tracker,
              const std::optional<RecallLists>& recall) {
             return self->forward(layer, query, key, value, cache, tracker, recall);
           },
           "Append key and value to the cache and attend with the call's queries [B, Hq, T, D], "
           "sparsely if the call is "
           "long enough; return [B, Hq, T, Dv].",
           {arg("layer"), arg("query"), arg("key"), arg("value"), arg("cache"), arg("tracker"),
            arg("recall") = std::optional<RecallLists>()})
      .def(
          "config",
          [](const Attention& self) { return c10::make_intrusive<ConfigHolder>(self->config()); },
          "Return the settings.")
      .def_pickle([](const Attention& self) { return to_state(self->config()); },
                  [](const ConfigState& state) {
                    return c10::make_intrusive<ChunkedSparseAttention>(from_state(state));
                  });
}

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  register_config(m);
  register_chunk_manager(m);
  register_cache(m);
  register_tracker(m);
  register_attention(m);
}

}  // namespace
}  // namespace h2o_prefill
