// The state of one prompt, for a model of your own: settings, keys and values, scores and memory
// sets, token ids and the keys that they recall.
//
//   h2o_prefill::PrefillContext context(num_layers, /*max_tokens=*/8192);   // preset "recommended"
//   context.begin(token_ids);                                               // int64 [1, T]
//   for (int64_t layer = 0; layer < num_layers; ++layer) {
//     ... query, key, value of the layer, after RoPE ...
//     at::Tensor attended = context.attend(layer, query, key, value);
//     ...
//   }
//
// The same calls prefill, continue the prompt, and decode. Contexts share nothing, so each may run
// on its own thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/chunked_sparse_attention.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/memory_set_tracker.h"

namespace h2o_prefill {

class H2O_API PrefillContext : public torch::CustomClassHolder {
 public:
  // num_layers: attention layers of the model. max_tokens: the largest length of a prompt with
  // its generated tokens; buffers begin small and grow by doubling up to it. Throws if the
  // settings are not valid. checkpoints: whether sparse calls keep what the next chunk needs at
  // each multiple of the chunk size, 2 to 3 % of 16-bit keys and values.
  PrefillContext(int64_t num_layers, int64_t max_tokens,
                 PrefillConfig config = PrefillConfig::preset("recommended"),
                 bool checkpoints = false);

  // There are no implicit copies, which would share cache and tracker.
  PrefillContext& operator=(PrefillContext&&) = delete;

  // Sets the text of the vocabulary, int32 [vocabulary, any], as lexical_recall() takes it: where
  // the settings have recall_characters, the next calls recall by it too. It is no part of the
  // pickled form.
  void set_token_text(const at::Tensor& token_text);

  // Begins a call with new tokens, int64 [B, T]; what they recall is found once for all layers.
  // total_tokens: of the whole prompt, from its first token to the last of the calls that are still
  // to come, where that is known; default: up to this call's last one. It resolves an open
  // min_prefill; a sparse prompt stays so. Throws c10::ValueError if it is less than the tokens so
  // far with this call's, or more than max_tokens, and if some layers have not attended in the
  // previous call: reset(), or truncate(), exactly to a checkpoint.
  void begin(const at::Tensor& token_ids, std::optional<int64_t> total_tokens = std::nullopt);

  // Begins a call of num_tokens tokens whose ids are unknown. Nothing is recalled from then on,
  // until reset().
  void begin(int64_t num_tokens, std::optional<int64_t> total_tokens = std::nullopt);

  // Attends with one layer's query [B, Hq, T, D], key [B, Hkv, T, D] and value [B, Hkv, T, Dv] of
  // the call's tokens, after RoPE, once for each layer. Returns [B, Hq, T, Dv]. scale: the softmax
  // scale, default D^-0.5. window: of a layer with a sliding window, >= 1; once the history is
  // longer, the layer is exact in it. A call that throws c10::ValueError leaves the layer as it
  // was.
  at::Tensor attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, std::optional<double> scale = std::nullopt,
                    std::optional<int64_t> window = std::nullopt);

  // Number of tokens that all layers hold.
  int64_t length() const;

  // Removes the tokens after the first `length`. Exact at a checkpoint; elsewhere the share of
  // removed queries in the scores of earlier tokens stays (see LayerState::truncate).
  void truncate(int64_t length);

  // The last length, up to this one and the tokens that are there, to which truncate() is exact.
  int64_t checkpoint_before(int64_t length) const;

  // Starts a new prompt; the buffers of keys and values stay allocated.
  void reset();

  // Writes the prompt, after a call in which all layers have attended, into a session file: docs/
  // cpp.md. fingerprint: tells models apart whose keys differ. Throws std::runtime_error if it
  // cannot be written.
  void save(const std::string& path, const std::string& fingerprint) const;

  // Replaces the prompt by a session file's. Throws c10::ValueError if the file is no session or is
  // damaged, of another model or of other settings, of other layers or more tokens than the context
  // has room for, or without the keys that have left a sliding window; the prompt stays as it was.
  void load(const std::string& path, const std::string& fingerprint);

  // The settings, with min_prefill as it was resolved for the last call.
  const PrefillConfig& config() const { return attention_.config(); }
  // Views of the layers.
  const c10::intrusive_ptr<ChunkedKVCache>& cache() const { return cache_; }
  const c10::intrusive_ptr<MemorySetTracker>& tracker() const { return tracker_; }

  // Ids of the tokens so far, int64 [B, length] on the CPU; undefined if there are none or some are
  // not known.
  at::Tensor token_ids() const;

  // The pickled form: plain tensors. Both directions copy.
  std::vector<at::Tensor> state_tensors() const;
  static c10::intrusive_ptr<PrefillContext> from_tensors(const std::vector<at::Tensor>& tensors);
  // An independent copy, without the text of tokens.
  c10::intrusive_ptr<PrefillContext> clone() const { return from_tensors(state_tensors()); }

 private:
  // A call under way.
  struct Call {
    int64_t past = 0;
    int64_t num_tokens = 0;
    int64_t prompt_tokens = 0;
    bool ids_known = true;              // before the call
    std::optional<int64_t> batch = {};  // of the token ids
    RecallLists recall = {};
  };

  // Begins a call; throws if the previous one is incomplete. batch: of the token ids, if given.
  void begin_call(int64_t num_tokens, std::optional<int64_t> total_tokens,
                  std::optional<int64_t> batch = std::nullopt);
  // Resolves an open min_prefill for a call with keys like this one.
  void resolve(const at::Tensor& key);
  // The recall lists of the call, on a device.
  const RecallLists& recall_on(const at::Device& device);

  void set_layers(std::vector<c10::intrusive_ptr<LayerState>> layers);
  int64_t num_layers() const { return std::ssize(layers_); }

  PrefillConfig unresolved_;         // the settings as they came
  std::optional<int64_t> shortest_;  // tokens of a prompt that is sparse, if min_prefill is open
  ChunkedSparseAttention attention_;
  int64_t max_tokens_;
  bool checkpoints_;
  std::vector<c10::intrusive_ptr<LayerState>> layers_;
  c10::intrusive_ptr<ChunkedKVCache> cache_;      // of layers_
  c10::intrusive_ptr<MemorySetTracker> tracker_;  // of layers_
  bool ids_known_ = true;
  at::Tensor ids_;  // [B, capacity] on the CPU; the first ids_length_ columns are known
  int64_t ids_length_ = 0;
  at::Tensor token_text_;
  std::optional<Call> call_;
};

}  // namespace h2o_prefill
