#include "h2o_prefill/package_session.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "common/checkpoint.h"
#include "common/rules.h"
#include "h2o_prefill/crossover.h"
#include "h2o_prefill/session_file.h"

namespace h2o_prefill {
namespace {

// The state: token ids, position, then these of each layer.
constexpr size_t kIds = 0, kPosition = 1, kFirstLayer = 2, kOfLayer = 5;
constexpr const char* kNames[kOfLayer] = {"key", "value", "scores", "memory", "errors"};

// Chunks of a call of prefill(), as of Python's chunked_prefill.
constexpr int64_t kChunksOfCall = 4;

// A layer's tensor up to the first tokens; memory set and errors are of all.
at::Tensor used(const at::Tensor* of_layer, size_t i, int64_t tokens) {
  return i < 3 ? of_layer[i].narrow(2, 0, tokens) : of_layer[i];
}

StateBuffers state_of(const std::vector<at::Tensor>& state, int64_t layer) {
  const at::Tensor* const of_layer = &state[kFirstLayer + layer * kOfLayer];
  return {of_layer[2], of_layer[3], of_layer[4]};
}

bool ends_with(const std::vector<int64_t>& tokens, const std::vector<int64_t>& sequence) {
  return !sequence.empty() && sequence.size() <= tokens.size() &&
         std::equal(sequence.rbegin(), sequence.rend(), tokens.rbegin());
}

// Where the continuation of an earlier place with the same last tokens begins; `length` if nowhere.
int64_t find_continuation(const int64_t* ids, int64_t length) {
  for (const int64_t size : {3, 2}) {
    for (int64_t begin = length - size - 1; begin >= 0; --begin) {
      if (std::equal(ids + begin, ids + begin + size, ids + length - size)) return begin + size;
    }
  }
  return length;
}

}  // namespace

PackageSession::PackageSession(std::shared_ptr<const Package> package, bool checkpoints)
    : package_(std::move(package)),
      state_(package_->new_state()),
      keeps_checkpoints_(checkpoints) {}

PackageSession::~PackageSession() = default;

int64_t PackageSession::length() const { return package_->length(state_); }

at::Tensor PackageSession::token_ids() const { return state_[kIds].narrow(1, 0, length()); }

int64_t PackageSession::last_chunk_begin() const {
  return state_[kPosition].const_data_ptr<int64_t>()[1];
}

void PackageSession::place(int64_t length, int64_t last_chunk_begin) {
  state_[kPosition].copy_(at::tensor({length, last_chunk_begin}, at::kLong));
  scored_ = std::min(scored_, length);
  checkpoints_.erase(checkpoints_.upper_bound(length), checkpoints_.end());
}

void PackageSession::reset() { place(0, 0); }

int64_t PackageSession::checkpoint_before(int64_t length) const {
  check_at_least("length", length, 0);
  length = std::min(length, this->length());
  if (length >= scored_) return length;
  return h2o_prefill::checkpoint_before(checkpoints_, length);
}

void PackageSession::truncate(int64_t length) {
  check_at_least("length", length, 0);
  if (length == 0) return reset();  // whatever a caller has written into the position
  const int64_t all = this->length();
  if (length >= all) return;
  int64_t begin = last_chunk_begin();
  if (length < scored_) {
    const auto found = checkpoints_.find(length);
    const bool exact = found != checkpoints_.end();
    const int64_t before = begin;
    for (int64_t layer = 0; layer < package_->info().layers; ++layer) {
      StateBuffers state = state_of(state_, layer);
      if (exact) {
        begin = found->second[layer].last_chunk_begin;
        restore_(state, length, found->second[layer]);
      } else {
        begin = cut_(state, length, all, before);
      }
    }
  }
  place(length, begin);
}

void PackageSession::check(const at::Tensor& token_ids) const {
  package_->check(token_ids, length());
}

void PackageSession::check_cancelled() {
  if (cancelled_.exchange(false)) throw Cancelled();
}

at::Tensor PackageSession::forward(const at::Tensor& token_ids, const at::Tensor& rows) {
  const int64_t past = length();
  auto logits = package_->run(token_ids, rows, state_);
  // Callers may have moved the position.
  scored_ = std::min(scored_, past);
  checkpoints_.erase(checkpoints_.upper_bound(past), checkpoints_.end());
  if (!package_->info().settings.is_sparse_call(past, token_ids.size(1))) return logits;
  scored_ = length();
  if (keeps_checkpoints_) {
    std::vector<Checkpoint>& kept = checkpoints_[scored_];
    for (int64_t layer = 0; layer < package_->info().layers; ++layer) {
      kept.push_back(checkpoint_of(state_of(state_, layer), scored_, last_chunk_begin()));
    }
  }
  return logits;
}

at::Tensor PackageSession::forward(const at::Tensor& token_ids, Rows rows) {
  check(token_ids);
  const int64_t tokens = token_ids.size(1);
  return forward(token_ids, at::arange(rows == Rows::kLast ? tokens - 1 : 0, tokens));
}

at::Tensor PackageSession::forward_densely(const at::Tensor& token_ids, Rows rows) {
  const int64_t most = package_->info().settings.sparse_from() - 1;
  TORCH_CHECK_VALUE(most >= 1, "every call of this package is sparse: its min_prefill is 1");
  check(token_ids);
  std::vector<at::Tensor> logits;
  for (const at::Tensor& part : token_ids.split(most, 1)) logits.push_back(forward(part, rows));
  return rows == Rows::kLast ? logits.back() : at::cat(logits);
}

int64_t PackageSession::shortest_sparse_prompt() const {
  const PackageInfo& info = package_->info();
  const at::Tensor& key = state_[kFirstLayer];
  if (!info.settings.is_auto() || info.settings.chunk_size == 1) return 0;
  return h2o_prefill::shortest_sparse_prompt(info.settings, device_cost(key).sparse_product);
}

at::Tensor PackageSession::prefill_some(const at::Tensor& token_ids, int64_t* done) {
  check_cancelled();
  const PrefillConfig& settings = package_->info().settings;
  // Calls of whole chunks. A rest that would be dense, or decoded, joins the last one. Calls of a
  // prompt that is not worth a sparse call are too short to be one.
  const int64_t length = this->length() - *done + token_ids.size(1);
  const bool dense = scored_ == 0 && length < shortest_sparse_prompt();
  const int64_t step = dense ? settings.sparse_from() - 1 : kChunksOfCall * settings.chunk_size;
  const int64_t least = dense ? 1 : std::max<int64_t>(settings.sparse_from(), 2);
  const int64_t left = token_ids.size(1) - *done;
  const int64_t tokens = left - step < least ? left : step;
  const auto logits = forward(token_ids.narrow(1, *done, tokens));
  *done += tokens;
  return logits;
}

at::Tensor PackageSession::prefill(const at::Tensor& token_ids,
                                   const std::function<void(int64_t, int64_t)>& on_progress) {
  check(token_ids);
  at::Tensor logits;
  for (int64_t done = 0; done < token_ids.size(1);) {
    logits = prefill_some(token_ids, &done);
    if (on_progress) on_progress(done, token_ids.size(1));
  }
  return logits;
}

// A token that follows the text, and its draft: [1, T].
at::Tensor PackageSession::with_draft(int64_t token, int64_t most) {
  const int64_t end = length() + 1;
  int64_t* const ids = state_[kIds].mutable_data_ptr<int64_t>();
  ids[end - 1] = token;  // as the next call writes it
  const int64_t begin = most > 0 ? find_continuation(ids, end) : end;
  const auto draft = state_[kIds].slice(1, begin, std::min(begin + most, end));
  return at::cat({state_[kIds].narrow(1, end - 1, 1), draft}, 1);
}

Answer::Answer(PackageSession& session, const at::Tensor& token_ids, GenerateOptions options,
               Sampler& sampler)
    : session_(session), prompt_(token_ids), options_(std::move(options)), sampler_(sampler) {
  check_at_least("max_new_tokens", options_.max_new_tokens, 1);
  check_at_least("draft_tokens", options_.draft_tokens, 0);
  session_.check(token_ids);
  const int64_t room = session_.package().info().capacity - session_.length() - token_ids.size(1);
  TORCH_CHECK_VALUE(options_.max_new_tokens <= room, "max_new_tokens must be <= ", room,
                    ", the room after the prompt, got ", options_.max_new_tokens);
}

std::optional<int64_t> Answer::step() {
  TORCH_CHECK(!ended_, "the answer has ended");
  const PackageInfo& info = session_.package().info();
  if (prefilled_ < prompt_.size(1)) {
    logits_ = session_.prefill_some(prompt_, &prefilled_);
    before_ = session_.length() - 1;
    return std::nullopt;
  }
  session_.check_cancelled();
  if (row_ == logits_.size(0)) {
    // Calls that verify tokens are dense.
    const int64_t drafted = std::min(options_.draft_tokens, info.settings.sparse_from() - 2);
    const int64_t left = options_.max_new_tokens - std::ssize(tokens_) - 1;
    call_ = session_.with_draft(tokens_.back(), std::min(drafted, left));
    before_ = session_.length();
    logits_ = session_.forward(call_, Rows::kAll);
    row_ = 0;
  }
  session_.state_[kPosition].mutable_data_ptr<int64_t>()[0] = before_ + row_ + 1;
  const int64_t token = sampler_.next(session_.token_ids(), logits_.narrow(0, row_, 1));
  tokens_.push_back(token);
  const auto stops = [&](const auto& sequence) { return ends_with(tokens_, sequence); };
  const auto& stop_sequences = options_.stop_sequences;
  ended_ = std::ssize(tokens_) == options_.max_new_tokens ||
           std::find(info.end_ids.begin(), info.end_ids.end(), token) != info.end_ids.end() ||
           std::any_of(stop_sequences.begin(), stop_sequences.end(), stops);
  // The next row is of the token that was drafted, if that is this one.
  const bool goes_on = ++row_ < logits_.size(0) && call_[0][row_].item<int64_t>() == token;
  if (!goes_on) row_ = logits_.size(0);
  return token;
}

std::vector<int64_t> PackageSession::generate(const at::Tensor& token_ids,
                                              const GenerateOptions& options, Sampler& sampler,
                                              const std::function<bool(int64_t)>& on_token) {
  Answer answer(*this, token_ids, options, sampler);
  while (!answer.ended()) {
    const auto token = answer.step();
    if (!token && options.on_progress) options.on_progress(answer.prefilled(), token_ids.size(1));
    if (token && on_token && !on_token(*token)) answer.stop();
  }
  return answer.tokens();
}

std::unique_ptr<PackageSession> PackageSession::branch() const {
  auto other = std::make_unique<PackageSession>(package_, keeps_checkpoints_);
  other->scored_ = scored_;
  other->checkpoints_ = checkpoints_;  // never written to
  const int64_t tokens = length();
  other->state_[kIds].narrow(1, 0, tokens).copy_(token_ids());
  other->state_[kPosition].copy_(state_[kPosition]);
  for (size_t first = kFirstLayer; first < state_.size(); first += kOfLayer) {
    for (size_t i = 0; i < kOfLayer; ++i) {
      used(&other->state_[first], i, tokens).copy_(used(&state_[first], i, tokens));
    }
  }
  return other;
}

void PackageSession::save(const std::string& path) const {
  const PackageInfo& info = package_->info();
  const int64_t tokens = length();
  check_at_least("length", tokens, 1);
  SessionFile saved{
      .model = info.model_hash, .settings = info.settings.to_fields(), .length = tokens};
  saved.tensors["token_ids"] = token_ids();
  const int64_t begin = last_chunk_begin();
  std::vector<int64_t> begins;
  for (int64_t layer = 0; layer < info.layers; ++layer) {
    const at::Tensor* of_layer = &state_[kFirstLayer + layer * kOfLayer];
    const auto scores = of_layer[2].narrow(2, 0, tokens);
    const bool scored = begin > 0 || scores.any().item<bool>();
    begins.push_back(scored ? begin : 0);
    for (size_t i = 0; i < (scored ? kOfLayer : 2); ++i) {
      saved.tensors[session_prefix(layer) + kNames[i]] = used(of_layer, i, tokens);
    }
  }
  saved.tensors["last_chunk_begin"] = at::tensor(begins, at::kLong);
  write_session_file(path, saved);
}

void PackageSession::load(const std::string& path, bool verify) try {
  const PackageInfo& info = package_->info();
  const SessionFile saved = read_session_file(path, verify);
  const int64_t tokens = saved.length;
  const auto& tensors = saved.tensors;
  const auto begins = tensors.at("last_chunk_begin");
  saved.check(info.model_hash, info.settings, info.layers, info.capacity);
  TORCH_CHECK_VALUE(tensors.contains("token_ids"), "session must have token ids");
  package_->check(tensors.at("token_ids"), 0);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  int64_t begin = 0;
  for (int64_t layer = 0; layer < info.layers; ++layer) {
    const at::Tensor* of_layer = &state_[kFirstLayer + layer * kOfLayer];
    for (size_t i = 0; i < kOfLayer; ++i) {
      const auto found = tensors.find(session_prefix(layer) + kNames[i]);
      if (found == tensors.end()) continue;
      const auto wanted = used(of_layer, i, tokens);
      TORCH_CHECK_VALUE(found->second.sizes() == wanted.sizes() &&
                            found->second.scalar_type() == wanted.scalar_type(),
                        "session must have ", found->first, " like ", describe(wanted), ", got ",
                        describe(found->second));
      copies.emplace_back(wanted, found->second);
    }
    const int64_t of_this = begins[layer].item<int64_t>();
    TORCH_CHECK_VALUE(of_this == 0 || begin == 0 || of_this == begin,
                      "last chunks of all layers must begin together, got ", begin, " and ",
                      of_this);
    begin = std::max(begin, of_this);
  }
  for (int64_t layer = 0; layer < info.layers; ++layer) {
    at::Tensor* of_layer = &state_[kFirstLayer + layer * kOfLayer];
    of_layer[2].zero_();
    of_layer[3].fill_(-1);
    of_layer[4].zero_();
  }
  copies.emplace_back(state_[kIds].narrow(1, 0, tokens), tensors.at("token_ids"));
  for (const auto& [to, from] : copies) to.copy_(from);
  checkpoints_.clear();
  place(tokens, begin);
  scored_ = tokens;
} catch (const c10::ValueError& error) {
  refuse_session(path, error);
}

}  // namespace h2o_prefill
