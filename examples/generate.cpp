// Continues a prompt greedily, by a model that was exported as a package, without Python:
//
//   generate PACKAGE.pt2 IDS [--max-new-tokens N] [--threads N] [--dense]
//
// IDS is a file of token ids (see read_token_ids), or - for standard input. The ids of the answer
// go to standard output as they come, the seconds to standard error. --dense prefills densely.
#include <ATen/ATen.h>

#include "command_line.h"
#include "package.h"
#include "text_tasks.h"

namespace {

void generate(const examples::Arguments& arguments) {
  const int64_t max_new_tokens = arguments.number("--max-new-tokens", 64);
  examples::Package package(arguments.model);
  const at::Tensor prompt = examples::read_token_ids(arguments.ids);
  const int64_t tokens = prompt.size(1);
  const examples::PackageInfo& info = package.info();
  examples::continue_greedily(
      prompt,
      {.max_new_tokens = max_new_tokens,
       .room = info.capacity - tokens,
       .end_ids = info.end_ids,
       .sparse = !arguments.dense && info.settings.is_sparse_call(/*past=*/0, tokens)},
      [&](const at::Tensor& token_ids) {
        return arguments.dense ? package.forward_densely(token_ids) : package.forward(token_ids);
      },
      [&](const at::Tensor& token) { return package.forward(token); });
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(
      &generate, "generate PACKAGE.pt2 IDS|- [--max-new-tokens N] [--threads N] [--dense]",
      {"--max-new-tokens"}, argc, argv);
}
