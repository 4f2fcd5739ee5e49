#include "h2o_prefill/prefill_context.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "core/session.h"
#include "core/state_header.h"
#include "h2o_prefill/crossover.h"

namespace h2o_prefill {
namespace {

// Tokens that the first buffers have room for.
constexpr int64_t kInitialCapacity = 1024;

// The pickled form begins with int64: whether the ids are known, whether checkpoints are kept, and
// what an open min_prefill was resolved to. The settings as bytes of text and the ids follow, then
// the layers.
constexpr int64_t kContextFields = 3;
// An upper bound, far above the length of a settings text that names every layer.
constexpr int64_t kLongestSettings = int64_t{1} << 22;

at::Tensor to_bytes(const std::string& text) {
  return at::tensor(at::ArrayRef(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

std::string to_text(const at::Tensor& bytes) {
  check_dims("tensors[1]", bytes, 1);
  check_dtype("tensors[1]", bytes, at::kByte);
  check_at_most("bytes of tensors[1]", bytes.size(0), kLongestSettings);
  const auto here = bytes.cpu().contiguous();
  return {static_cast<const char*>(here.const_data_ptr()), here.nbytes()};
}

}  // namespace

PrefillContext::PrefillContext(int64_t num_layers, int64_t max_tokens, PrefillConfig config,
                               bool checkpoints)
    : unresolved_(std::move(config)),
      attention_(unresolved_),
      max_tokens_(max_tokens),
      checkpoints_(checkpoints) {
  check_num_layers(num_layers);
  check_at_least("max_tokens", max_tokens, 1);
  for (const int64_t layer : this->config().dense_layers) {
    TORCH_CHECK_VALUE(layer < num_layers, "dense_layers must name layers < ", num_layers,
                      ", the layers of the context, got ", layer);
  }
  set_layers(
      empty_layers(num_layers, checkpoints, std::min(kInitialCapacity, max_tokens), max_tokens));
}

void PrefillContext::set_layers(LayerStates layers) {
  layers_ = std::move(layers);
  for (const auto& layer : layers_) layer->configure(checkpoints_, max_tokens_);
  cache_ = c10::make_intrusive<ChunkedKVCache>(layers_);
  tracker_ = c10::make_intrusive<MemorySetTracker>(layers_, unresolved_);
}

int64_t PrefillContext::length() const {
  int64_t shortest = layers_[0]->length();
  for (const auto& layer : layers_) shortest = std::min(shortest, layer->length());
  return shortest;
}

void PrefillContext::begin_call(int64_t num_tokens, std::optional<int64_t> total_tokens,
                                std::optional<int64_t> batch) {
  const int64_t past = length();
  check_call_tokens(past, num_tokens);
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    TORCH_CHECK_VALUE(layers_[layer]->length() == past, "every layer must attend in a call, layer ",
                      layer,
                      " has and others have not in the last one: reset(), or truncate() to a "
                      "checkpoint");
  }
  TORCH_CHECK_VALUE(num_tokens <= max_tokens_ - past, "max_tokens must be >= ", past + num_tokens,
                    ", the tokens after this call, got ", max_tokens_);
  const int64_t prompt_tokens = total_tokens.value_or(past + num_tokens);
  check_between("total_tokens", prompt_tokens, past + num_tokens, max_tokens_);
  // The ids of a call that no layer attended in are not the prompt's.
  if (call_ && call_->past == past && call_->num_tokens > 0) ids_known_ = call_->ids_known;
  call_.reset();
  if (past == 0 && unresolved_.is_auto()) attention_ = ChunkedSparseAttention(unresolved_);
  TORCH_CHECK_VALUE(!batch || past == 0 || !ids_known_ || *batch == ids_.size(0),
                    "token_ids must have the batch size of the prompt (", ids_.size(0), "), got ",
                    *batch);
  call_ = Call{.past = past,
               .num_tokens = num_tokens,
               .prompt_tokens = prompt_tokens,
               .ids_known = ids_known_,
               .batch = batch};
}

void PrefillContext::begin(int64_t num_tokens, std::optional<int64_t> total_tokens) {
  begin_call(num_tokens, total_tokens);
  ids_known_ = ids_known_ && num_tokens == 0;
}

void PrefillContext::begin(const at::Tensor& token_ids, std::optional<int64_t> total_tokens) {
  check_dims("token_ids", token_ids, 2);
  check_dtype("token_ids", token_ids, at::kLong);
  const int64_t past = length();
  const int64_t added = token_ids.size(1);
  begin_call(added, total_tokens, token_ids.size(0));
  if (!ids_known_) return;
  // Ordinary tensors, as in the cache.
  const c10::InferenceMode ordinary_tensors(false);
  if (!ids_.defined() || ids_.size(0) != token_ids.size(0) || past + added > ids_.size(1)) {
    const int64_t capacity =
        std::max(past + added, ids_.defined() ? 2 * ids_.size(1) : kInitialCapacity);
    auto larger = at::empty({token_ids.size(0), capacity}, at::kLong);
    if (past > 0) larger.narrow(1, 0, past).copy_(ids_.narrow(1, 0, past));
    ids_ = std::move(larger);
  }
  ids_.narrow(1, past, added).copy_(token_ids);
  ids_length_ = past + added;
}

void PrefillContext::set_token_text(const at::Tensor& token_text) {
  check_token_text(token_text);
  token_text_ = token_text;
}

void PrefillContext::resolve(const at::Tensor& key) {
  if (!unresolved_.is_auto() || config().min_prefill == unresolved_.chunk_size) return;
  if (!shortest_) {
    shortest_ = shortest_sparse_prompt(unresolved_, device_cost(key).sparse_product);
  }
  // The session of a package may be open still.
  const bool is_sparse = layers_.back()->has_scores();
  const int64_t tokens = is_sparse ? *shortest_ : call_->prompt_tokens;
  const PrefillConfig resolved = unresolved_.resolved(*shortest_, tokens);
  if (resolved.min_prefill == config().min_prefill) return;
  attention_ = ChunkedSparseAttention(resolved);
}

const RecallLists& PrefillContext::recall_on(const at::Device& device) {
  RecallLists& lists = call_->recall;
  const bool wanted = config().recall > 0 && ids_known_ && ids_length_ > call_->past &&
                      config().is_sparse_call(call_->past, call_->num_tokens);
  if (wanted && !lists.offsets.defined()) {
    lists = lexical_recall(ids_.narrow(1, 0, ids_length_), call_->past, config(), token_text_);
  }
  if (lists.offsets.defined() && lists.offsets.device() != device) {
    lists = converted(lists, [&](const at::Tensor& list) { return list.to(device); });
  }
  return lists;
}

at::Tensor PrefillContext::attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, std::optional<double> scale,
                                  std::optional<int64_t> window) {
  check_layer(layer, num_layers());
  TORCH_CHECK_VALUE(call_, "begin() must be called before the layers of a call attend");
  check_dims("query", query, 4);
  TORCH_CHECK_VALUE(query.size(2) == call_->num_tokens,
                    "query must have the tokens that the call began with (", call_->num_tokens,
                    "), got shape ", query.sizes());
  TORCH_CHECK_VALUE(!call_->batch || query.size(0) == *call_->batch,
                    "query must have the batch size of the token ids (", call_->batch.value_or(0),
                    "), got shape ", query.sizes());
  TORCH_CHECK_VALUE(layers_[layer]->length() == call_->past,
                    "a layer must attend once in a call, layer ", layer,
                    " has attended already: begin() the next call");
  check_dims("key", key, 4);
  resolve(key);
  return attention_.forward(layer, query, key, value, cache_, tracker_, scale,
                            recall_on(query.device()), window);
}

void PrefillContext::truncate(int64_t length) {
  check_at_least("length", length, 0);
  if (call_ && length <= call_->past) ids_known_ = call_->ids_known;
  h2o_prefill::truncate(layers_, length);
  ids_length_ = std::min(ids_length_, length);
  if (length == 0) ids_known_ = true;
  call_.reset();
}

int64_t PrefillContext::checkpoint_before(int64_t length) const {
  return tracker_->checkpoint_before(std::min(length, this->length()));
}

void PrefillContext::reset() { truncate(0); }

at::Tensor PrefillContext::token_ids() const {
  const int64_t known = std::min(ids_length_, length());
  if (!ids_known_ || known == 0) return {};
  return ids_.narrow(1, 0, known);
}

void PrefillContext::save(const std::string& path, const std::string& fingerprint) const {
  const int64_t tokens = length();
  check_at_least("length", tokens, 1);
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    TORCH_CHECK_VALUE(layers_[layer]->length() == tokens,
                      "every layer must have attended in the last call, layer ", layer,
                      " is ahead of others");
  }
  Session{config().to_fields(), fingerprint, token_ids(), layers_}.write(path);
}

void PrefillContext::load(const std::string& path, const std::string& fingerprint) {
  Session session = Session::read(path, fingerprint, unresolved_, num_layers(), max_tokens_);
  reset();
  if (unresolved_.is_auto()) {
    attention_ = ChunkedSparseAttention(PrefillConfig::parse(session.settings));
  }
  set_layers(std::move(session.layers));
  ids_ = session.token_ids;
  ids_known_ = ids_.defined();
  ids_length_ = ids_known_ ? length() : 0;
}

std::vector<at::Tensor> PrefillContext::state_tensors() const {
  const auto ids = token_ids();
  return tensors_of({ids_known_, checkpoints_, config().min_prefill.value_or(0)}, layers_,
                    {to_bytes(unresolved_.to_fields()),
                     ids.defined() ? ids.clone() : at::empty({0, 0}, at::kLong)});
}

c10::intrusive_ptr<PrefillContext> PrefillContext::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  StateReader state(tensors, kContextFields, /*record_fields=*/1);
  const auto others = state.take(2, "settings and token ids");
  LayerStates layers = layers_of(state);
  const int64_t num_layers = std::ssize(layers), max_tokens = layers[0]->max_capacity();
  auto context = c10::make_intrusive<PrefillContext>(num_layers, max_tokens,
                                                     PrefillConfig::parse(to_text(others[0])),
                                                     /*checkpoints=*/state.field(1) != 0);
  if (PrefillConfig resolved = context->unresolved_; resolved.is_auto()) {
    resolved.min_prefill = state.field(2);
    context->attention_ = ChunkedSparseAttention(std::move(resolved));
  }
  context->set_layers(std::move(layers));
  const at::Tensor& ids = others[1];
  check_dims("tensors[2]", ids, 2);
  check_dtype("tensors[2]", ids, at::kLong);
  context->ids_known_ = state.field(0) != 0;
  const int64_t length = context->length();
  if (!context->ids_known_ || length == 0) return context;
  const int64_t batch = context->cache_->key(0).size(0);
  TORCH_CHECK_VALUE(ids.size(0) == batch && ids.size(1) == length,
                    "tensors[2] must hold the ids of ", batch, " rows and ", length,
                    " tokens, got shape ", ids.sizes());
  context->ids_ = ids.cpu().clone(at::MemoryFormat::Contiguous);
  context->ids_length_ = length;
  return context;
}

}  // namespace h2o_prefill
