// Runs a model that was exported as a package, without Python:
//
//   generate PACKAGE.pt2 IDS [--max-new-tokens N] [--perplexity WINDOW] [--threads N] [--dense]
//
// IDS is a file of token ids (see read_token_ids), or - for standard input. The prompt is continued
// greedily: the ids of the answer go to standard output as they come, the seconds to standard
// error. --perplexity scores it instead, in windows (see print_perplexity). --dense prefills
// densely.
#include <ATen/ATen.h>
#include <h2o_prefill/session.h>

#include "command_line.h"
#include "text_tasks.h"

namespace {

using h2o_prefill::Rows;

void run(const examples::Arguments& arguments) {
  const int64_t max_new_tokens = arguments.number("--max-new-tokens", 64);
  const int64_t window = arguments.number("--perplexity", 0);
  h2o_prefill::Session session(std::make_shared<const h2o_prefill::Package>(arguments.model));
  const at::Tensor ids = examples::read_token_ids(arguments.ids);
  const auto prefill = [&](const at::Tensor& token_ids, Rows rows) {
    return arguments.dense ? session.forward_densely(token_ids, rows)
                           : session.forward(token_ids, rows);
  };
  if (window > 0) {
    examples::print_perplexity(ids, window, [&](const at::Tensor& token_ids) {
      session.reset();
      return prefill(token_ids, Rows::kAll);
    });
    return;
  }
  const h2o_prefill::PackageInfo& info = session.package().info();
  examples::continue_greedily(
      ids,
      {.max_new_tokens = max_new_tokens,
       .room = info.capacity - ids.size(1),
       .end_ids = info.end_ids,
       .sparse = !arguments.dense && info.settings.is_sparse_call(/*past=*/0, ids.size(1))},
      [&](const at::Tensor& token_ids) { return prefill(token_ids, Rows::kLast); },
      [&](const at::Tensor& token) { return session.forward(token); });
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(
      &run,
      "generate PACKAGE.pt2 IDS|- [--max-new-tokens N] [--perplexity WINDOW] [--threads N] "
      "[--dense]",
      {"--max-new-tokens", "--perplexity"}, argc, argv);
}
