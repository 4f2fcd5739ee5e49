// The tasks of the programs, for any model: read the token ids of a text, continue it, and score
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace examples {

// Token ids, int64 [1, n], of a file of numbers as text; "-": of standard input. Throws
// std::runtime_error if there are none, or anything else.
at::Tensor read_token_ids(const std::string& path);

// Throws std::runtime_error if token_ids, int64 [1, T], are none, or some are not in
// [0, vocabulary).
void check_token_ids(const at::Tensor& token_ids, int64_t vocabulary);

// Logits [rows, vocabulary] of token_ids, int64 [1, T].
using Forward = std::function<at::Tensor(const at::Tensor& token_ids)>;

struct Continuation {
  int64_t max_new_tokens;
  int64_t room;                  // tokens that fit after the prompt
  std::vector<int64_t> end_ids;  // token ids that end a text
  bool sparse;                   // whether the prompt is prefilled sparsely
};

// Continues a prompt greedily. The ids of the answer go to standard output as they come, the
// seconds to standard error. prefill gets the prompt, then decode each new token; both give the
// logits [1, vocabulary] after the last one.
void continue_greedily(const at::Tensor& prompt, const Continuation& how, const Forward& prefill,
                       const Forward& decode);

// Prints the perplexity of a text, int64 [1, n]. The text is cut into windows of `context` tokens
// that do not overlap, and every token of a window but its first is scored, as `h2o-prefill ppl`
// does; the rest after the last whole window is not. forward returns the logits
// [context, vocabulary] of a window, independently of the text before it.
void print_perplexity(const at::Tensor& ids, int64_t context, const Forward& forward);

}  // namespace examples
