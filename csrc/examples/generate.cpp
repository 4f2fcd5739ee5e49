// Continues a prompt greedily, by a model that was exported as a package, without Python:
//
//   generate PACKAGE.pt2 IDS [--max-new-tokens N] [--threads N] [--dense]
//
// IDS is a file of token ids (see read_token_ids), or - for standard input. The ids of the answer
// go to standard output as they come, the seconds to standard error. --dense prefills densely.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "package.h"

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void generate(const examples::Arguments& arguments) {
  const int64_t max_new_tokens = arguments.number("--max-new-tokens", 64);
  examples::Package package(arguments.package);
  const at::Tensor prompt = examples::read_token_ids(arguments.ids);
  const int64_t tokens = prompt.size(1);

  auto start = std::chrono::steady_clock::now();
  at::Tensor logits = arguments.dense ? package.forward_densely(prompt) : package.forward(prompt);
  const double prefill_seconds = seconds_since(start);

  const auto& end_ids = package.info().end_ids;
  const int64_t room = package.info().capacity - tokens;
  start = std::chrono::steady_clock::now();
  int64_t decoded = 0;
  for (int64_t i = 0; i < max_new_tokens; ++i) {
    const at::Tensor token = logits.argmax(-1, /*keepdim=*/true);
    const auto id = token.item<int64_t>();
    std::cout << id << ' ' << std::flush;
    if (std::find(end_ids.begin(), end_ids.end(), id) != end_ids.end()) break;
    if (i + 1 == max_new_tokens || decoded == room) break;
    logits = package.forward(token);
    ++decoded;
  }
  const double decode_seconds = seconds_since(start);
  std::cout << '\n';

  const bool sparse =
      !arguments.dense && package.info().settings.is_sparse_call(/*past=*/0, tokens);
  std::cerr << "prefill: " << tokens << " tokens, " << (sparse ? "sparse" : "dense") << ", "
            << prefill_seconds << " s; decoding: " << decoded / std::max(decode_seconds, 1e-9)
            << " tokens/s\n";
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(
      &generate, "generate PACKAGE.pt2 IDS|- [--max-new-tokens N] [--threads N] [--dense]",
      {"--max-new-tokens"}, argc, argv);
}
