#include "h2o_prefill/prefill_context.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "core/state_header.h"
#include "h2o_prefill/crossover.h"
#include "h2o_prefill/session_file.h"

namespace h2o_prefill {
namespace {

// Tokens that the first buffers have room for.
constexpr int64_t kInitialCapacity = 1024;

// The pickled form begins with int64: whether the ids are known, how many tensors are the cache's,
// and what an open min_prefill was resolved to. The settings as bytes of text and the ids follow,
// then the cache's and the tracker's tensors.
constexpr int64_t kContextHeaderFields = 3;
constexpr int64_t kFirstStateTensor = 3;
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
    : given_(std::move(config)), attention_(given_) {
  check_at_least("num_layers", num_layers, 1);
  check_at_least("max_tokens", max_tokens, 1);
  for (const int64_t layer : this->config().dense_layers) {
    TORCH_CHECK_VALUE(layer < num_layers, "dense_layers must name layers < ", num_layers,
                      ", the layers of the context, got ", layer);
  }
  cache_ = c10::make_intrusive<ChunkedKVCache>(num_layers, std::min(kInitialCapacity, max_tokens),
                                               max_tokens);
  tracker_ = c10::make_intrusive<MemorySetTracker>(num_layers, this->config(), checkpoints);
}

int64_t PrefillContext::length() const {
  int64_t shortest = cache_->length(0);
  for (int64_t layer = 1; layer < num_layers(); ++layer) {
    shortest = std::min(shortest, cache_->length(layer));
  }
  return shortest;
}

void PrefillContext::begin_call(int64_t num_tokens, std::optional<int64_t> total_tokens,
                                std::optional<int64_t> batch) {
  const int64_t past = length();
  check_call_tokens(past, num_tokens);
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    TORCH_CHECK_VALUE(cache_->length(layer) == past, "every layer must attend in a call, layer ",
                      layer, " has and others have not in the last one: truncate(", past,
                      ") undoes it");
  }
  TORCH_CHECK_VALUE(num_tokens <= cache_->max_capacity() - past,
                    "max_tokens must be >= ", past + num_tokens,
                    ", the tokens after this call, got ", cache_->max_capacity());
  const int64_t prompt_tokens = total_tokens.value_or(past + num_tokens);
  check_between("total_tokens", prompt_tokens, past + num_tokens, cache_->max_capacity());
  undo_incomplete_call();  // one that no layer attended in: its ids are not the prompt's
  call_.reset();
  if (past == 0 && given_.is_auto()) attention_ = ChunkedSparseAttention(given_);
  TORCH_CHECK_VALUE(!batch || past == 0 || !ids_known_ || *batch == ids_.size(0),
                    "token_ids must have the batch size of the prompt (", ids_.size(0), "), got ",
                    *batch);
  call_ = Call{.past = past,
               .num_tokens = num_tokens,
               .prompt_tokens = prompt_tokens,
               .ids_known = ids_known_,
               .layers = std::vector<std::optional<PrefillState>>(num_layers()),
               .batch = batch};
}

void PrefillContext::undo(int64_t layer) {
  auto& before = call_->layers[layer];
  if (before) tracker_->rewind(layer, *before);
  before.reset();
}

void PrefillContext::undo_incomplete_call() {
  if (!call_ || length() > call_->past || call_->num_tokens == 0) return;
  for (int64_t layer = 0; layer < num_layers(); ++layer) undo(layer);
  cache_->truncate(call_->past);
  ids_known_ = call_->ids_known;
  ids_length_ = std::min(ids_length_, call_->past);
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
  if (!given_.is_auto() || config().min_prefill == given_.chunk_size) return;
  if (!shortest_) {
    shortest_ = shortest_sparse_prompt(given_, device_cost(key).sparse_product);
  }
  // The session of a package may be open still.
  const bool is_sparse = tracker_->has_scores(num_layers() - 1);
  const int64_t tokens = is_sparse ? *shortest_ : call_->prompt_tokens;
  const PrefillConfig resolved = given_.resolved(*shortest_, tokens);
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
  TORCH_CHECK_VALUE(cache_->length(layer) == call_->past,
                    "a layer must attend once in a call, layer ", layer,
                    " has attended already: begin() the next call");
  check_dims("key", key, 4);
  resolve(key);
  if (call_->num_tokens > 0 && config().is_sparse(layer, call_->past, call_->num_tokens)) {
    call_->layers[layer] = tracker_->state(layer);
  }
  try {
    auto out = attention_.forward(layer, query, key, value, cache_, tracker_, scale,
                                  recall_on(query.device()), window);
    // After the last layer the call is complete.
    if (length() > call_->past) call_->layers.assign(num_layers(), std::nullopt);
    return out;
  } catch (...) {
    undo(layer);
    throw;
  }
}

void PrefillContext::truncate(int64_t length) {
  check_at_least("length", length, 0);
  undo_incomplete_call();
  cache_->truncate(length);
  tracker_->truncate(length);
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

void PrefillContext::save(const std::string& path, const std::string& model) const {
  const int64_t tokens = length();
  check_at_least("length", tokens, 1);
  SessionFile session{.model = model, .settings = config().to_fields(), .length = tokens};
  std::vector<int64_t> begins;
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    TORCH_CHECK_VALUE(cache_->length(layer) == tokens,
                      "every layer must have attended in the last call, layer ", layer,
                      " is ahead of others: truncate(", tokens, ") undoes it");
    const std::string prefix = session_prefix(layer);
    session.tensors[prefix + "key"] = cache_->key(layer);
    session.tensors[prefix + "value"] = cache_->value(layer);
    begins.push_back(tracker_->last_chunk_begin(layer));
    if (!tracker_->has_scores(layer)) continue;
    // Tokens that came densely have score 0.
    const auto scores = tracker_->scores(layer);
    session.tensors[prefix + "scores"] = at::constant_pad_nd(scores, {0, tokens - scores.size(2)});
    session.tensors[prefix + "memory"] = tracker_->indices(layer);
    session.tensors[prefix + "errors"] = tracker_->errors(layer);
    const Checkpoints kept = tracker_->checkpoints(layer);
    if (!kept.memory.defined()) continue;
    session.tensors[prefix + "checkpoint_memory"] = kept.memory;
    session.tensors[prefix + "checkpoint_scores"] = kept.scores;
    session.tensors[prefix + "checkpoint_errors"] = kept.errors;
  }
  session.tensors["last_chunk_begin"] = at::tensor(begins, at::kLong);
  if (token_ids().defined()) session.tensors["token_ids"] = token_ids();
  write_session_file(path, session);
}

void PrefillContext::load(const std::string& path, const std::string& model, bool verify) try {
  const SessionFile session = read_session_file(path, verify);
  const int64_t tokens = session.length;
  const auto& tensors = session.tensors;
  const auto begins = tensors.at("last_chunk_begin");
  session.check(model, given_, num_layers(), cache_->max_capacity());
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    const int64_t rows = tensors.at(session_prefix(layer) + "key").size(2);
    TORCH_CHECK_VALUE(rows == tokens, "session must have the keys of all ", tokens,
                      " tokens, layer ", layer, " has ", rows);
  }
  reset();
  if (given_.is_auto()) attention_ = ChunkedSparseAttention(PrefillConfig::parse(session.settings));
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    const std::string prefix = session_prefix(layer);
    cache_->append(layer, tensors.at(prefix + "key"), tensors.at(prefix + "value"));
    if (tensors.count(prefix + "scores") == 0) continue;
    tracker_->update(layer, {.scores = tensors.at(prefix + "scores"),
                             .memory = tensors.at(prefix + "memory"),
                             .last_chunk_begin = begins[layer].item<int64_t>(),
                             .errors = tensors.at(prefix + "errors")});
    if (tensors.count(prefix + "checkpoint_memory") == 0) continue;
    tracker_->keep_checkpoints(layer, 0, config().chunk_size,
                               {.memory = tensors.at(prefix + "checkpoint_memory").clone(),
                                .scores = tensors.at(prefix + "checkpoint_scores").clone(),
                                .errors = tensors.at(prefix + "checkpoint_errors").clone()});
  }
  ids_known_ = tensors.count("token_ids") > 0;
  if (!ids_known_) return;
  const c10::InferenceMode ordinary_tensors(false);
  ids_ = tensors.at("token_ids").clone(at::MemoryFormat::Contiguous);
  ids_length_ = tokens;
} catch (const c10::ValueError& error) {
  refuse_session(path, error);
}

std::vector<at::Tensor> PrefillContext::state_tensors() const {
  const auto cache = cache_->state_tensors();
  const auto tracker = tracker_->state_tensors();
  const auto ids = token_ids();
  std::vector<at::Tensor> tensors{
      at::tensor({int64_t{ids_known_}, std::ssize(cache), config().min_prefill.value_or(0)},
                 at::kLong),
      to_bytes(given_.to_fields()), ids.defined() ? ids.clone() : at::empty({0, 0}, at::kLong)};
  tensors.insert(tensors.end(), cache.begin(), cache.end());
  tensors.insert(tensors.end(), tracker.begin(), tracker.end());
  return tensors;
}

c10::intrusive_ptr<PrefillContext> PrefillContext::from_tensors(
    const std::vector<at::Tensor>& tensors) {
  const StateReader state(tensors, kContextHeaderFields, /*layer_fields=*/0);
  const int64_t cache_tensors = state.field(1);
  const int64_t num_tensors = std::ssize(tensors);
  TORCH_CHECK_VALUE(num_tensors > kFirstStateTensor && cache_tensors > 0 &&
                        cache_tensors < num_tensors - kFirstStateTensor,
                    "tensors must be a state of PrefillContext, got ", num_tensors, " tensors");
  const auto first_cache = tensors.begin() + kFirstStateTensor;
  const auto first_tracker = first_cache + cache_tensors;
  const auto cache = ChunkedKVCache::from_tensors({first_cache, first_tracker});
  const auto tracker = MemorySetTracker::from_tensors({first_tracker, tensors.end()});
  auto context = c10::make_intrusive<PrefillContext>(cache->num_layers(), cache->max_capacity(),
                                                     PrefillConfig::parse(to_text(tensors[1])));
  if (PrefillConfig resolved = context->given_; resolved.is_auto()) {
    resolved.min_prefill = state.field(2);
    context->attention_ = ChunkedSparseAttention(std::move(resolved));
  }
  TORCH_CHECK_VALUE(tracker->num_layers() == cache->num_layers(),
                    "tensors must hold a cache and a tracker of the same layers, got ",
                    cache->num_layers(), " and ", tracker->num_layers());
  context->cache_ = cache;
  context->tracker_ = tracker;
  const at::Tensor& ids = tensors[2];
  check_dims("tensors[2]", ids, 2);
  check_dtype("tensors[2]", ids, at::kLong);
  context->ids_known_ = state.field(0) != 0;
  const int64_t length = context->length();
  if (!context->ids_known_ || length == 0) return context;
  const int64_t batch = cache->key(0).size(0);
  TORCH_CHECK_VALUE(ids.size(0) == batch && ids.size(1) == length,
                    "tensors[2] must hold the ids of ", batch, " rows and ", length,
                    " tokens, got shape ", ids.sizes());
  context->ids_ = ids.cpu().clone(at::MemoryFormat::Contiguous);
  context->ids_length_ = length;
  return context;
}

}  // namespace h2o_prefill
