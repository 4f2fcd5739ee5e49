#include "text_tasks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <string>

#include "errors.h"

namespace examples {
namespace {

// Rows whose probabilities are computed at once: float32 logits of a whole window may be a GiB.
constexpr int64_t kRows = 256;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Sum of the negative log-likelihoods of all tokens of a window [1, N] but the first, from its
// logits [N, vocabulary].
double total_loss(const at::Tensor& logits, const at::Tensor& window) {
  const int64_t scored = window.size(1) - 1;
  double loss = 0;
  for (int64_t row = 0; row < scored; row += kRows) {
    const int64_t rows = std::min(kRows, scored - row);
    const auto targets = window[0].narrow(0, row + 1, rows).unsqueeze(1);
    const auto scores = logits.narrow(0, row, rows).to(at::kFloat).log_softmax(-1);
    loss -= scores.gather(1, targets).sum(at::kDouble).item<double>();
  }
  return loss;
}

}  // namespace

at::Tensor read_token_ids(const std::string& path) {
  std::vector<int64_t> ids;
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    file.peek();  // a folder opens, but cannot be read
    if (!file.good() && !file.eof()) fail("cannot read ", path);
  }
  std::istream& in = path == "-" ? std::cin : file;
  for (int64_t id = 0; in >> id;) ids.push_back(id);
  if (!in.eof()) fail(path, " must hold token ids with white space between");
  if (ids.empty()) fail("the prompt is empty: ", path, " holds no token ids");
  return at::tensor(ids, at::kLong).unsqueeze(0);
}

void check_token_ids(const at::Tensor& token_ids, int64_t vocabulary) {
  if (token_ids.size(1) == 0) fail("the prompt is empty");
  const int64_t lowest = token_ids.min().item<int64_t>();
  const int64_t highest = token_ids.max().item<int64_t>();
  if (lowest < 0 || highest >= vocabulary) {
    fail("token ids must be in [0, ", vocabulary, "), got ", lowest < 0 ? lowest : highest,
         ": were they made by another tokenizer?");
  }
}

void continue_greedily(const at::Tensor& prompt, const Continuation& how, const Forward& prefill,
                       const Forward& decode) {
  auto start = std::chrono::steady_clock::now();
  at::Tensor logits = prefill(prompt);
  const double prefill_seconds = seconds_since(start);

  start = std::chrono::steady_clock::now();
  int64_t decoded = 0;
  for (int64_t i = 0; i < how.max_new_tokens; ++i) {
    const at::Tensor token = logits.argmax(-1, /*keepdim=*/true);
    const auto id = token.item<int64_t>();
    std::cout << id << ' ' << std::flush;
    if (std::find(how.end_ids.begin(), how.end_ids.end(), id) != how.end_ids.end()) break;
    if (i + 1 == how.max_new_tokens || decoded == how.room) break;
    logits = decode(token);
    ++decoded;
  }
  const double decode_seconds = seconds_since(start);
  std::cout << '\n';

  std::cerr << "prefill: " << prompt.size(1) << " tokens, " << (how.sparse ? "sparse" : "dense")
            << ", " << prefill_seconds
            << " s; decoding: " << decoded / std::max(decode_seconds, 1e-9) << " tokens/s\n";
}

void print_perplexity(const at::Tensor& ids, int64_t context, const Forward& forward) {
  const int64_t windows = ids.size(1) / context;
  if (context < 2 || windows == 0) {
    fail("windows must have between 2 and ", ids.size(1), " tokens, all of the text, got ",
         context);
  }
  double loss = 0;
  for (int64_t i = 0; i < windows; ++i) {
    const auto window = ids.narrow(1, i * context, context);
    loss += total_loss(forward(window), window);
  }
  std::cout << "perplexity " << std::exp(loss / static_cast<double>(windows * (context - 1)))
            << " over " << windows << " windows of " << context << " tokens\n";
}

}  // namespace examples
