#include "h2o_prefill/session.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "common/rules.h"
#include "h2o_prefill/saved_session.h"

namespace h2o_prefill {
namespace {

// The state: token ids, position, then these of each layer.
constexpr size_t kIds = 0, kPosition = 1, kFirstLayer = 2, kOfLayer = 5;
constexpr const char* kNames[kOfLayer] = {"key", "value", "scores", "memory", "errors"};

// Chunks of a call of prefill(), as of Python's chunked_prefill.
constexpr int64_t kChunksOfCall = 4;

// What a tensor of a layer has of the first tokens: memory set and errors are of all.
at::Tensor used(const at::Tensor* of_layer, size_t i, int64_t tokens) {
  return i < 3 ? of_layer[i].narrow(2, 0, tokens) : of_layer[i];
}

bool ends_with(const std::vector<int64_t>& tokens, const std::vector<int64_t>& sequence) {
  return !sequence.empty() && sequence.size() <= tokens.size() &&
         std::equal(sequence.rbegin(), sequence.rend(), tokens.rbegin());
}

// Where in a text of `length` ids what its last tokens were followed by begins; `length` if
// nowhere.
int64_t find_continuation(const int64_t* ids, int64_t length) {
  for (const int64_t size : {3, 2}) {
    for (int64_t begin = length - size - 1; begin >= 0; --begin) {
      if (std::equal(ids + begin, ids + begin + size, ids + length - size)) return begin + size;
    }
  }
  return length;
}

}  // namespace

Session::Session(std::shared_ptr<const Package> package)
    : package_(std::move(package)), state_(package_->new_state()) {}

int64_t Session::length() const { return package_->length(state_); }

at::Tensor Session::token_ids() const { return state_[kIds].narrow(1, 0, length()); }

void Session::reset() { state_[kPosition].zero_(); }

void Session::check(const at::Tensor& token_ids) const { package_->check(token_ids, length()); }

void Session::check_cancelled() {
  if (cancelled_.exchange(false)) throw Cancelled();
}

at::Tensor Session::forward(const at::Tensor& token_ids, const at::Tensor& rows) {
  return package_->run(token_ids, rows, state_);
}

at::Tensor Session::forward(const at::Tensor& token_ids, Rows rows) {
  check(token_ids);
  const int64_t tokens = token_ids.size(1);
  return package_->run(token_ids, at::arange(rows == Rows::kLast ? tokens - 1 : 0, tokens), state_);
}

at::Tensor Session::forward_densely(const at::Tensor& token_ids, Rows rows) {
  const int64_t most = package_->info().settings.sparse_from() - 1;
  TORCH_CHECK_VALUE(most >= 1, "every call of this package is sparse: its min_prefill is 1");
  check(token_ids);
  std::vector<at::Tensor> logits;
  for (const at::Tensor& part : token_ids.split(most, 1)) logits.push_back(forward(part, rows));
  return rows == Rows::kLast ? logits.back() : at::cat(logits);
}

at::Tensor Session::prefill(const at::Tensor& token_ids,
                            const std::function<void(int64_t, int64_t)>& on_progress) {
  check(token_ids);
  const PrefillConfig& settings = package_->info().settings;
  const int64_t total = token_ids.size(1);
  // Calls of whole chunks. A rest that would be dense, or decoded, joins the last one.
  const int64_t step = kChunksOfCall * settings.chunk_size;
  const int64_t least = std::max<int64_t>(settings.sparse_from(), 2);
  at::Tensor logits;
  for (int64_t done = 0; done < total;) {
    check_cancelled();
    const int64_t rest = total - done - step;
    const int64_t tokens = rest < least ? total - done : step;
    logits = forward(token_ids.narrow(1, done, tokens));
    done += tokens;
    if (on_progress) on_progress(done, total);
  }
  return logits;
}

// A token that follows the text, and its draft: [1, T].
at::Tensor Session::with_draft(int64_t token, int64_t most) {
  const int64_t end = length() + 1;
  int64_t* const ids = state_[kIds].mutable_data_ptr<int64_t>();
  ids[end - 1] = token;  // as the next call writes it
  const int64_t begin = most > 0 ? find_continuation(ids, end) : end;
  const auto draft = state_[kIds].slice(1, begin, std::min(begin + most, end));
  return at::cat({state_[kIds].narrow(1, end - 1, 1), draft}, 1);
}

std::vector<int64_t> Session::generate(const at::Tensor& token_ids, const GenerateOptions& options,
                                       Sampler& sampler,
                                       const std::function<bool(int64_t)>& on_token) {
  const PackageInfo& info = package_->info();
  check_at_least("max_new_tokens", options.max_new_tokens, 1);
  check_at_least("draft_tokens", options.draft_tokens, 0);
  check(token_ids);
  TORCH_CHECK_VALUE(options.max_new_tokens <= info.capacity - length() - token_ids.size(1),
                    "max_new_tokens must be <= ", info.capacity - length() - token_ids.size(1),
                    ", the room after the prompt, got ", options.max_new_tokens);
  // Calls that verify tokens are dense.
  const int64_t drafted = std::min(options.draft_tokens, info.settings.sparse_from() - 2);
  at::Tensor call, logits = prefill(token_ids, options.on_progress);
  std::vector<int64_t> answer;
  while (true) {
    const int64_t before = length() - logits.size(0);
    for (int64_t row = 0; row < logits.size(0); ++row) {
      state_[kPosition].mutable_data_ptr<int64_t>()[0] = before + row + 1;
      check_cancelled();
      const int64_t token = sampler.next(this->token_ids(), logits.narrow(0, row, 1));
      answer.push_back(token);
      const bool wanted = !on_token || on_token(token);
      const auto stops = [&](const auto& sequence) { return ends_with(answer, sequence); };
      const bool ended =
          !wanted ||
          std::find(info.end_ids.begin(), info.end_ids.end(), token) != info.end_ids.end() ||
          std::any_of(options.stop_sequences.begin(), options.stop_sequences.end(), stops);
      if (ended || std::ssize(answer) == options.max_new_tokens) return answer;
      if (row + 1 < logits.size(0) && call[0][row + 1].item<int64_t>() != token) break;
    }
    call = with_draft(answer.back(),
                      std::min(drafted, options.max_new_tokens - std::ssize(answer) - 1));
    logits = forward(call, Rows::kAll);
  }
}

std::unique_ptr<Session> Session::branch() const {
  auto other = std::make_unique<Session>(package_);
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

void Session::save(const std::string& path) const {
  const PackageInfo& info = package_->info();
  const int64_t tokens = length();
  check_at_least("length", tokens, 1);
  SavedSession saved{
      .model = info.model_hash, .settings = info.settings.to_fields(), .length = tokens};
  saved.tensors["token_ids"] = token_ids();
  const int64_t begin = state_[kPosition].const_data_ptr<int64_t>()[1];
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
  write_session(path, saved);
}

void Session::load(const std::string& path, bool verify) {
  const PackageInfo& info = package_->info();
  const SavedSession saved = read_session(path, verify);
  const int64_t tokens = saved.length;
  const auto& tensors = saved.tensors;
  const auto begins = tensors.at("last_chunk_begin");
  saved.check(info.model_hash, info.settings, info.layers, info.capacity);
  TORCH_CHECK_VALUE(tensors.contains("token_ids"), "session must have token ids");
  package_->check(tensors.at("token_ids"), 0);
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
    for (size_t i = 0; i < kOfLayer; ++i) {
      const auto found = tensors.find(session_prefix(layer) + kNames[i]);
      if (found == tensors.end()) continue;
      used(of_layer, i, tokens).copy_(found->second);
    }
  }
  state_[kIds].narrow(1, 0, tokens).copy_(tensors.at("token_ids"));
  state_[kPosition].copy_(at::tensor({tokens, begin}, at::kLong));
}

}  // namespace h2o_prefill
