// The classes as torch.classes.h2o_prefill.*, for Python and TorchScript.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/config_fields.h"
#include "common/holder.h"
#include "h2o_prefill/chunk_manager.h"
#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/chunked_sparse_attention.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/crossover.h"
#include "h2o_prefill/memory_set_tracker.h"
#include "h2o_prefill/prefill_context.h"

namespace h2o_prefill {
namespace {

using torch::arg;

using Config = Held<PrefillConfig>;
using Chunks = c10::intrusive_ptr<ChunkManager>;
using Cache = c10::intrusive_ptr<ChunkedKVCache>;
using Tracker = c10::intrusive_ptr<MemorySetTracker>;
using Attention = c10::intrusive_ptr<ChunkedSparseAttention>;
using Context = c10::intrusive_ptr<PrefillContext>;

// The result of lexical_recall in TorchScript.
using Lists = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

RecallLists unpacked(const std::optional<Lists>& lists) {
  if (!lists) return {};
  const auto& [offsets, positions, visible_from] = *lists;
  return {.offsets = offsets, .positions = positions, .visible_from = visible_from};
}

// The constructor takes every field by name, and there is a read-only attribute for each.
template <typename... Fields>
void add_fields(torch::class_<Holder<PrefillConfig>>& cls, const ConfigField<Fields>&... fields) {
  const PrefillConfig defaults;
  cls.def(torch::init([fields...](Fields... values) {
            PrefillConfig config;
            ((config.*fields.member = std::move(values)), ...);
            return hold(std::move(config));
          }),
          "Settings of one sparse prefill; see h2o_prefill.PrefillConfig for the meaning of each.",
          {(arg(fields.name) = defaults.*fields.member)...});
  (cls.def_property(fields.name,
                    [member = fields.member](const Config& self) { return self->object.*member; }),
   ...);
}

// State as plain tensors, which is how objects are pickled.
template <typename T>
void add_state(torch::class_<T>& cls) {
  cls.def("state_tensors", &T::state_tensors, "Return everything as plain tensors: copies.")
      .def_static("from_tensors", &T::from_tensors, "Build one from what state_tensors returned.")
      .def_pickle([](const c10::intrusive_ptr<T>& self) { return self->state_tensors(); },
                  [](const std::vector<at::Tensor>& tensors) { return T::from_tensors(tensors); });
}

void register_config(torch::Library& m) {
  auto cls = m.class_<Holder<PrefillConfig>>("PrefillConfig");
  std::apply([&](const auto&... fields) { add_fields(cls, fields...); }, kConfigFields);
  cls.def_static(
         "preset", [](const std::string& name) { return hold(PrefillConfig::preset(name)); },
         "Return the settings of a preset.")
      .def_static(
          "parse", [](const std::string& text) { return hold(PrefillConfig::parse(text)); },
          "Return the settings that a text like \"recommended,local_window=256\" stands "
          "for.")
      .def_static(
          "preset_names", [] { return PrefillConfig::preset_names(); },
          "Return the names of the presets.")
      .def("with_fields",
           [](const Config& self, const std::string& fields) {
             return hold(self->object.with(fields));
           },
           "Return a copy with the fields of a text like \"local_window=256\" changed.",
           {arg("fields")})
      .def("to_string", of(&PrefillConfig::to_string),
           "Return the shortest text that parse() reads as these settings.")
      .def("to_fields", of(&PrefillConfig::to_fields), "Return the text that names every field.")
      .def("advice", of(&PrefillConfig::advice),
           "Return a sentence for each setting that is valid but unlikely to be wanted.")
      .def("of_layer", of(&PrefillConfig::of_layer), "Return the settings of one layer.",
           {arg("layer")})
      .def("memory_size", of(&PrefillConfig::memory_size),
           "Return the positions that a memory set holds at most: K + L + H.")
      .def("recall_block", of(&PrefillConfig::recall_block),
           "Return the number of rows that share a list of recalled keys.")
      .def("sparse_from", of(&PrefillConfig::sparse_from),
           "Return the minimum number of new tokens for a sparse call.")
      .def("shortest_sparse_prompt",
           [](const Config& self, double sparse_product) {
             return shortest_sparse_prompt(self->object, sparse_product);
           },
           "Return the length from which sparse attention is faster, at a device's cost of it.",
           {arg("sparse_product")})
      .def("resolved", of(&PrefillConfig::resolved),
           "Return the settings of a prompt, with an open min_prefill resolved.",
           {arg("shortest"), arg("prompt_tokens")})
      .def("is_dense_layer", of(&PrefillConfig::is_dense_layer),
           "Return whether a layer stays dense.", {arg("layer")})
      .def("is_sparse", of(&PrefillConfig::is_sparse),
           "Return whether a layer's call with num_tokens new tokens after `past` earlier ones is "
           "sparse.",
           {arg("layer"), arg("past"), arg("num_tokens")})
      .def("is_long_call", of(&PrefillConfig::is_long_call),
           "Return whether a call has enough new tokens to be sparse, and does not decode.",
           {arg("past"), arg("num_tokens")})
      .def("is_sparse_call", of(&PrefillConfig::is_sparse_call),
           "Return whether a call is sparse in the layers that are not dense.",
           {arg("past"), arg("num_tokens")})
      .def("last_chunk_begin", of(&PrefillConfig::last_chunk_begin),
           "Return where the last chunk of a call begins.", {arg("past"), arg("num_tokens")})
      .def_pickle([](const Config& self) { return self->object.to_fields(); },
                  [](const std::string& fields) { return hold(PrefillConfig::parse(fields)); });
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
      .def("end", &ChunkManager::end, "Return the position after the last of a chunk.",
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
  auto cls = m.class_<ChunkedKVCache>("ChunkedKVCache");
  cls.def(torch::init<int64_t, int64_t, int64_t>(),
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
           "Drop every token after the first `length` of every layer.", {arg("length")})
      .def("reset", &ChunkedKVCache::reset, "Forget all tokens; the buffers stay allocated.");
  add_state(cls);
}

void register_tracker(torch::Library& m) {
  auto cls = m.class_<MemorySetTracker>("MemorySetTracker");
  cls.def(torch::init<int64_t, int64_t, int64_t, int64_t>(),
          "Scores and memory set of every layer of one prompt.",
          {arg("num_layers"), arg("local_window"), arg("heavy_budget"), arg("sink_tokens") = 0})
      .def_static(
          "for_config",
          [](int64_t num_layers, const Config& config) {
            return c10::make_intrusive<MemorySetTracker>(num_layers, config->object);
          },
          "Return a tracker with the budgets of a config.")
      .def("init_chunk_scores", &MemorySetTracker::init_chunk_scores,
           "Set the scores of a new chunk to the column sums of phase 1, [B, Hkv, T].",
           {arg("layer"), arg("chunk_begin"), arg("colsum")})
      .def("accumulate_memory_scores", &MemorySetTracker::accumulate_memory_scores,
           "Add the column sums of phase 2, [B, Hkv, M], to the scores of the memory set.",
           {arg("layer"), arg("colsum")})
      .def("build_memory_set", &MemorySetTracker::build_memory_set,
           "Build the set that the chunk after chunk_end attends to; return it, int32 [B, Hkv, "
           "memory_size].",
           {arg("layer"), arg("chunk_end")})
      .def("indices", &MemorySetTracker::indices,
           "Return a layer's memory set, int32 [B, Hkv, memory_size].", {arg("layer")})
      .def("scores", &MemorySetTracker::scores, "Return a layer's scores, [B, Hkv, length].",
           {arg("layer")})
      .def("errors", &MemorySetTracker::errors,
           "Return what errors of each KV head were measured, float32 [B, Hkv, 4].", {arg("layer")})
      .def("has_scores", &MemorySetTracker::has_scores, "Return whether a layer has scores.",
           {arg("layer")})
      .def("num_layers", &MemorySetTracker::num_layers, "Return the number of layers.")
      .def("memory_size", &MemorySetTracker::memory_size,
           "Return the positions that a memory set of a layer holds at most.", {arg("layer") = 0})
      .def("local_window", &MemorySetTracker::local_window, "Return L.")
      .def("heavy_budget", &MemorySetTracker::heavy_budget, "Return H.")
      .def("sink_tokens", &MemorySetTracker::sink_tokens, "Return K.")
      .def("length", &MemorySetTracker::length, "Return the positions that have scores.",
           {arg("layer")})
      .def("last_chunk_begin", &MemorySetTracker::last_chunk_begin,
           "Return where the last chunk of a layer began.", {arg("layer")})
      .def(
          "update",
          [](const Tracker& self, int64_t layer, const at::Tensor& scores, const at::Tensor& memory,
             int64_t last_chunk_begin, const std::optional<at::Tensor>& errors) {
            self->update(layer, {.scores = scores,
                                 .memory = memory,
                                 .last_chunk_begin = last_chunk_begin,
                                 .errors = errors.value_or(at::Tensor())});
          },
          "Replace the state of a layer by what chunked_sparse_attention returned.",
          {arg("layer"), arg("scores"), arg("memory"), arg("last_chunk_begin"),
           arg("errors") = std::optional<at::Tensor>()})
      .def("truncate", &MemorySetTracker::truncate,
           "Remove the tokens after the first `length` of every layer.", {arg("length")})
      .def("reset", &MemorySetTracker::reset, "Forget every layer.");
  add_state(cls);
}

void register_attention(torch::Library& m) {
  m.class_<ChunkedSparseAttention>("ChunkedSparseAttention")
      .def(torch::init([](const Config& config) {
             return c10::make_intrusive<ChunkedSparseAttention>(config->object);
           }),
           "Attention of one model under chunked sparse prefill; holds the settings only.",
           {arg("config")})
      .def("forward",
           [](const Attention& self, int64_t layer, const at::Tensor& query, const at::Tensor& key,
              const at::Tensor& value, const Cache& cache, const Tracker& tracker,
              std::optional<double> scale, const std::optional<Lists>& recall,
              std::optional<int64_t> window) {
             return self->forward(layer, query, key, value, cache, tracker, scale, unpacked(recall),
                                  window);
           },
           "Append key and value to the cache and attend with the call's queries [B, Hq, T, D], "
           "sparsely or densely as the settings say, or exactly in a window that the history does "
           "not fit into; return [B, Hq, T, Dv].",
           {arg("layer"), arg("query"), arg("key"), arg("value"), arg("cache"), arg("tracker"),
            arg("scale") = std::optional<double>(), arg("recall") = std::optional<Lists>(),
            arg("window") = std::optional<int64_t>()})
      .def("config", of(&ChunkedSparseAttention::config), "Return the settings.")
      .def_pickle(
          [](const Attention& self) { return self->config().to_fields(); },
          [](const std::string& fields) {
            return c10::make_intrusive<ChunkedSparseAttention>(PrefillConfig::parse(fields));
          });
}

void register_context(torch::Library& m) {
  auto cls = m.class_<PrefillContext>("PrefillContext");
  cls.def(torch::init(
              [](int64_t num_layers, int64_t max_tokens, const Config& config, bool checkpoints) {
                return c10::make_intrusive<PrefillContext>(num_layers, max_tokens, config->object,
                                                           checkpoints);
              }),
          "The state of one prompt: settings, keys and values, scores and memory sets, token "
          "ids and the keys that they recall.",
          {arg("num_layers"), arg("max_tokens"), arg("config"), arg("checkpoints") = false})
      .def("set_token_text", &PrefillContext::set_token_text,
           "Set the text of the vocabulary, int32 [vocabulary, any], that calls recall by too.",
           {arg("token_text")})
      .def("begin",
           [](const Context& self, const at::Tensor& token_ids, std::optional<int64_t> total) {
             self->begin(token_ids, total);
           },
           "Begin a call with new tokens, int64 [B, T]; total_tokens: of the whole prompt, this "
           "call's and earlier ones included.",
           {arg("token_ids"), arg("total_tokens") = std::optional<int64_t>()})
      .def("begin_without_ids",
           [](const Context& self, int64_t num_tokens, std::optional<int64_t> total) {
             self->begin(num_tokens, total);
           },
           "Begin a call of tokens whose ids are not known; nothing is recalled from then on. "
           "total_tokens: as of begin.",
           {arg("num_tokens"), arg("total_tokens") = std::optional<int64_t>()})
      .def("attend", &PrefillContext::attend,
           "Attend with one layer's query [B, Hq, T, D], key [B, Hkv, T, D] and value [B, Hkv, T, "
           "Dv] of the call's tokens; return [B, Hq, T, Dv].",
           {arg("layer"), arg("query"), arg("key"), arg("value"),
            arg("scale") = std::optional<double>(), arg("window") = std::optional<int64_t>()})
      .def("length", &PrefillContext::length, "Return the tokens that all layers hold.")
      .def("checkpoint_before", &PrefillContext::checkpoint_before,
           "Return the last length, up to this one, to which truncate is exact.", {arg("length")})
      .def("truncate", &PrefillContext::truncate,
           "Drop all tokens after the first `length`; exact at a checkpoint.", {arg("length")})
      .def("reset", &PrefillContext::reset, "Forget the prompt; the buffers stay allocated.")
      .def("config", of(&PrefillContext::config), "Return the settings.")
      .def("cache", of(&PrefillContext::cache), "Return keys and values.")
      .def("tracker", of(&PrefillContext::tracker), "Return scores and memory sets.")
      .def(
          "token_ids",
          [](const Context& self) {
            const at::Tensor ids = self->token_ids();
            return ids.defined() ? std::optional<at::Tensor>(ids) : std::nullopt;
          },
          "Return the ids of the tokens so far, int64 [B, length]; None if some are not known.")
      .def("save", &PrefillContext::save,
           "Write the prompt into a session file; fingerprint: of the model.",
           {arg("path"), arg("fingerprint")})
      .def("load", &PrefillContext::load, "Replace the prompt by a session file's.",
           {arg("path"), arg("fingerprint")});
  add_state(cls);
}

}  // namespace

void register_layer_state(torch::Library& m);

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  register_config(m);
  register_layer_state(m);
  register_chunk_manager(m);
  register_cache(m);
  register_tracker(m);
  register_attention(m);
  register_context(m);
}

}  // namespace h2o_prefill
