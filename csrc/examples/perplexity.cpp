// Perplexity of a text under a model that was exported as a package, without Python:
//
//   perplexity PACKAGE.pt2 IDS [--context N] [--threads N] [--dense]
//
// IDS is a file of token ids (see read_token_ids), or - for standard input. The text is cut into
// windows of N tokens (4096) that do not overlap, and every token of a window but its first is
// scored, as `h2o-prefill ppl` does. What is left behind the last whole window is not.
#include <ATen/ATen.h>

#include <cmath>
#include <iostream>
#include <stdexcept>

#include "package.h"

namespace {

// Rows whose probabilities are computed at once: float32 logits of a whole window may be a GiB.
constexpr int64_t kRows = 256;

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

void perplexity(const examples::Arguments& arguments) {
  const int64_t context = arguments.number("--context", 4096);
  examples::Package package(arguments.package);
  const at::Tensor ids = examples::read_token_ids(arguments.ids);
  const int64_t windows = ids.size(1) / context;
  if (context < 2 || windows == 0) {
    throw std::runtime_error("--context must be in [2, " + std::to_string(ids.size(1)) +
                             "], the tokens of the text, got " + std::to_string(context));
  }
  double loss = 0;
  for (int64_t i = 0; i < windows; ++i) {
    const auto window = ids.narrow(1, i * context, context);
    package.reset();
    const auto logits = arguments.dense ? package.forward_densely(window, examples::Rows::kAll)
                                        : package.forward(window, examples::Rows::kAll);
    loss += total_loss(logits, window);
  }
  std::cout << "perplexity " << std::exp(loss / static_cast<double>(windows * (context - 1)))
            << " over " << windows << " windows of " << context << " tokens\n";
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(&perplexity,
                               "perplexity PACKAGE.pt2 IDS|- [--context N] [--threads N] [--dense]",
                               {"--context"}, argc, argv);
}
