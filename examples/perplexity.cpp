// Perplexity of a text under a model that was exported as a package, without Python:
//
//   perplexity PACKAGE.pt2 IDS [--context N] [--threads N] [--dense]
//
// IDS is a file of token ids (see read_token_ids), or - for standard input. The text is cut into
// windows of N tokens (4096), see print_perplexity.
#include <ATen/ATen.h>

#include "command_line.h"
#include "package.h"
#include "text_tasks.h"

namespace {

void perplexity(const examples::Arguments& arguments) {
  const int64_t context = arguments.number("--context", 4096);
  examples::Package package(arguments.model);
  const auto forward = [&](const at::Tensor& window) {
    package.reset();
    return arguments.dense ? package.forward_densely(window, examples::Rows::kAll)
                           : package.forward(window, examples::Rows::kAll);
  };
  examples::print_perplexity(examples::read_token_ids(arguments.ids), context, forward);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(&perplexity,
                               "perplexity PACKAGE.pt2 IDS|- [--context N] [--threads N] [--dense]",
                               {"--context"}, argc, argv);
}
