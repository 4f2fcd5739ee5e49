// One prompt of a package: its state, and the calls that a service makes with it.
//
//   h2o_prefill::PackageSession session(package);
//   h2o_prefill::Sampler sampler;   // greedy
//   session.generate(prompt_ids, {.max_new_tokens = 200}, sampler,
//                    [](int64_t token) { ...; return true; });
//   session.save("book.session");
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "h2o_prefill/export.h"
#include "h2o_prefill/layer_state.h"
#include "h2o_prefill/package.h"
#include "h2o_prefill/sampler.h"

namespace h2o_prefill {

// prefill() and generate() throw it after cancel().
class H2O_API Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("the call was cancelled") {}
};

// Tokens of a call whose logits are wanted.
enum class Rows { kLast, kAll };

struct GenerateOptions {
  int64_t max_new_tokens = 128;
  // Token sequences that end the text too, beside the package's end ids.
  std::vector<std::vector<int64_t>> stop_sequences = {};
  // Called during prefill with the tokens that are done, and all.
  std::function<void(int64_t, int64_t)> on_progress = {};
  // The most tokens to draft before a call, which verifies them all: they followed the last two or
  // three tokens where the text had these before. The answer is the same as with 0, but for
  // logits that calls of several tokens round otherwise.
  int64_t draft_tokens = 0;
};

// Sessions share their package and nothing else, so each may have a thread of its own; one session
// is for one thread at a time, but for cancel().
class H2O_API PackageSession {
 public:
  // checkpoints: whether sparse calls keep what later ones need at their end.
  explicit PackageSession(std::shared_ptr<const Package> package, bool checkpoints = false);
  ~PackageSession();

  const Package& package() const { return *package_; }

  // Number of tokens so far, and their ids, int64 [1, length].
  int64_t length() const;
  at::Tensor token_ids() const;

  // Removes all tokens.
  void reset();

  // Removes the tokens after the first `length`. Exact at a checkpoint; elsewhere scores of earlier
  // tokens keep the share of removed queries.
  void truncate(int64_t length);

  // The last length, up to this one and the tokens that are there, to which truncate() is exact:
  // later calls give, to the bit, what they give after a text that was never longer. That is the
  // end of a sparse call, any length after the last one, or 0.
  int64_t checkpoint_before(int64_t length) const;

  // Continues the text by token_ids, int64 [1, T]. Returns logits [1 or T, vocabulary]. Throws
  // c10::ValueError if there are no tokens, some are out of the vocabulary, or there is no room for
  // them.
  at::Tensor forward(const at::Tensor& token_ids, Rows rows = Rows::kLast);

  // The same for rows of the call, int64 [R]. Returns logits [R, vocabulary].
  at::Tensor forward(const at::Tensor& token_ids, const at::Tensor& rows);

  // The same with dense attention, in calls that are too short to be sparse.
  at::Tensor forward_densely(const at::Tensor& token_ids, Rows rows = Rows::kLast);

  // The same in calls of about 1,024 tokens, between which it tells its progress and can be
  // cancelled: the tokens so far stay then. Where the package's min_prefill is open and the prompt
  // too short for sparse attention to be faster, the calls are dense. Returns the logits [1,
  // vocabulary] of the last token.
  at::Tensor prefill(const at::Tensor& token_ids,
                     const std::function<void(int64_t, int64_t)>& on_progress = {});

  // Continues the text by a prompt, int64 [1, T], and an answer, whose tokens on_token gets as they
  // come. The answer ends with an end id or a stop sequence, or where on_token returns false. The
  // last token is not in the text yet: the next prompt begins with it, or it is left out. Throws as
  // forward() does, and Cancelled.
  std::vector<int64_t> generate(const at::Tensor& token_ids, const GenerateOptions& options,
                                Sampler& sampler,
                                const std::function<bool(int64_t)>& on_token = {});

  // The tensors of the state, as Package::new_state() has them; they change with every call.
  const std::vector<at::Tensor>& state() const { return state_; }

  // Makes the call that another thread is in throw Cancelled; without one, the next.
  void cancel() { cancelled_ = true; }

  // A session that goes on from the same tokens: a copy.
  std::unique_ptr<PackageSession> branch() const;

  // Writes the text into a session file, or replaces it by a file's, of this model and these
  // settings, as PrefillContext does.
  void save(const std::string& path) const;
  void load(const std::string& path);

 private:
  friend class Answer;

  void check(const at::Tensor& token_ids) const;
  void check_cancelled();
  // Prefills the next tokens of a prompt, in one call; returns the logits of the last of them.
  at::Tensor prefill_some(const at::Tensor& token_ids, int64_t* done);
  at::Tensor with_draft(int64_t token, int64_t most);
  // From which length on a prompt is sparse, if the package's min_prefill is open; else 0.
  int64_t shortest_sparse_prompt() const;

  int64_t last_chunk_begin() const;
  // Writes the position after `length` tokens.
  void place(int64_t length);

  std::shared_ptr<const Package> package_;
  std::vector<at::Tensor> state_;
  std::vector<c10::intrusive_ptr<LayerState>> layers_;  // of the tensors in state_
  bool keeps_checkpoints_;
  std::atomic<bool> cancelled_ = false;
};

// The answer to a prompt, step by step, as generate() makes it. The session may do nothing else
// until it is complete.
class H2O_API Answer {
 public:
  // Throws as generate() does. session and sampler outlive the answer.
  Answer(PackageSession& session, const at::Tensor& token_ids, GenerateOptions options,
         Sampler& sampler);
  Answer& operator=(Answer&&) = delete;

  // Takes a step: prefills about 1,024 tokens of the prompt, and returns nothing, or returns a
  // token. Throws Cancelled.
  std::optional<int64_t> step();

  // Ends the answer after the last token.
  void stop() { ended_ = true; }
  bool ended() const { return ended_; }

  // Prefilled tokens of the prompt, and tokens of the answer so far.
  int64_t prefilled() const { return prefilled_; }
  const std::vector<int64_t>& tokens() const { return tokens_; }

 private:
  PackageSession& session_;
  at::Tensor prompt_;
  GenerateOptions options_;
  Sampler& sampler_;
  int64_t prefilled_ = 0;
  std::vector<int64_t> tokens_;
  bool ended_ = false;
  at::Tensor call_, logits_;  // the last call's tokens, drafted ones included, and logits
  int64_t row_ = 0;           // of these logits, the next to choose from
  int64_t before_ = 0;        // tokens before their first row
};

}  // namespace h2o_prefill
