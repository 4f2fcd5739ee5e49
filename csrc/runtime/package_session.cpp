#include "h2o_prefill/package_session.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "common/rules.h"
#include "core/session.h"
#include "h2o_prefill/crossover.h"

namespace h2o_prefill {
namespace {

// The state: token ids, position, then these of each layer.
constexpr size_t kIds = 0, kPosition = 1, kFirstLayer = 2, kOfLayer = 5;

// Chunks of a call of prefill(), at most, and its tokens, rounded up to chunks: activations take
// memory for each token, and linear layers are slower with fewer.
constexpr int64_t kChunksOfCall = 4, kTokensOfCall = 1024;

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
    : package_(std::move(package)), state_(package_->new_state()), keeps_checkpoints_(checkpoints) {
  for (size_t i = kFirstLayer; i < state_.size(); i += kOfLayer) {
    layers_.push_back(LayerState::of_buffers(
        {state_[i], state_[i + 1], state_[i + 2], state_[i + 3], state_[i + 4]}));
  }
}

PackageSession::~PackageSession() = default;

int64_t PackageSession::length() const { return package_->length(state_); }

at::Tensor PackageSession::token_ids() const { return state_[kIds].narrow(1, 0, length()); }

int64_t PackageSession::last_chunk_begin() const {
  return state_[kPosition].const_data_ptr<int64_t>()[1];
}

void PackageSession::place(int64_t length) {
  // The layers that are dense have no last chunk.
  int64_t begin = 0;
  for (const auto& layer : layers_) begin = std::max(begin, layer->last_chunk_begin());
  state_[kPosition].copy_(at::tensor({length, begin}, at::kLong));
}

void PackageSession::reset() { truncate(0); }

int64_t PackageSession::checkpoint_before(int64_t length) const {
  return h2o_prefill::checkpoint_before(layers_, std::min(length, this->length()));
}

void PackageSession::truncate(int64_t length) {
  check_at_least("length", length, 0);
  if (length > 0 && length >= this->length()) return;
  h2o_prefill::truncate(layers_, length);
  place(length);
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
  const PrefillConfig& settings = package_->info().settings;
  for (int64_t i = 0; i < std::ssize(layers_); ++i) {
    const bool is_sparse = settings.is_sparse(i, past, token_ids.size(1));
    // Callers may have moved the position.
    layers_[i]->commit(past, length(), is_sparse, last_chunk_begin());
    if (is_sparse && keeps_checkpoints_) layers_[i]->keep_checkpoint(settings.of_layer(i));
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
  const auto has_scores = [](const auto& layer) { return layer->has_scores(); };
  const bool dense = std::ranges::none_of(layers_, has_scores) && length < shortest_sparse_prompt();
  const int64_t from = settings.sparse_from(), chunk = settings.chunk_size;
  const auto chunks = [&](int64_t tokens) { return (tokens + chunk - 1) / chunk; };
  const int64_t most = std::max(chunks(from), std::min(chunks(kTokensOfCall), kChunksOfCall));
  const int64_t step = dense ? from - 1 : most * chunk;
  const int64_t least = dense ? 1 : std::max<int64_t>(from, 2);
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
  const int64_t tokens = length();
  other->state_[kIds].narrow(1, 0, tokens).copy_(token_ids());
  other->state_[kPosition].copy_(state_[kPosition]);
  for (size_t i = 0; i < layers_.size(); ++i) other->layers_[i]->copy_from(*layers_[i]);
  return other;
}

void PackageSession::save(const std::string& path) const {
  const PackageInfo& info = package_->info();
  check_at_least("length", length(), 1);
  h2o_prefill::truncate(layers_, length());  // rows of drafts
  Session{info.settings.to_fields(), info.model_hash, token_ids(), layers_}.write(path);
}

void PackageSession::load(const std::string& path) {
  const PackageInfo& info = package_->info();
  const Session session =
      Session::read(path, info.model_hash, info.settings, info.layers, info.capacity);
  TORCH_CHECK_VALUE(session.token_ids.defined(), "session '", one_line(path),
                    "' cannot be read: it must have token ids");
  package_->check(session.token_ids, 0);
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i]->check_fits(*session.layers[i]);
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i]->copy_from(*session.layers[i]);
  state_[kIds].narrow(1, 0, session.length()).copy_(session.token_ids);
  place(session.length());
}

}  // namespace h2o_prefill
