// Runs a Llama model of a Hugging Face folder, without Python and without an export:
//
//   llama FOLDER IDS [--max-new-tokens N] [--perplexity WINDOW] [--save-logits FILE.pt]
//         [--settings recommended] [--dense] [--threads N]
//
// FOLDER holds config.json and the weights as safetensors, IDS is a file of token ids (see
// read_token_ids), or - for standard input. The prompt is continued greedily, as generate.cpp does.
// --perplexity scores it instead, in windows (see print_perplexity). --save-logits writes the
// logits [T, vocabulary] of the prompt instead, for torch.load. --dense prefills densely.
#include <ATen/ATen.h>
#include <h2o_prefill/prefill_context.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "command_line.h"
#include "errors.h"
#include "llama_model.h"
#include "text_tasks.h"

namespace {

void save(const at::Tensor& tensor, const std::string& path) {
  const std::vector<char> bytes = torch::jit::pickle_save(tensor);
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush()) {
    examples::fail("cannot write ", path);
  }
}

void run(const examples::Arguments& arguments) {
  auto settings = h2o_prefill::PrefillConfig::parse(arguments.text("--settings", "recommended"));
  if (arguments.dense) settings.min_prefill = std::numeric_limits<int32_t>::max();
  const int64_t max_new_tokens = arguments.number("--max-new-tokens", 64);
  const int64_t window = arguments.number("--perplexity", 0);
  const at::Tensor ids = examples::read_token_ids(arguments.ids);
  const examples::LlamaModel model(arguments.model);

  // Tokens of a prompt, and those that fit after it.
  const int64_t tokens = window > 0 ? window : ids.size(1);
  const int64_t room = model.config().max_position_embeddings - tokens;
  if (room < 0) {
    examples::fail("the model takes at most ", model.config().max_position_embeddings,
                   " tokens (max_position_embeddings), got ", tokens,
                   window > 0 ? ": choose a smaller window" : ": shorten the prompt");
  }
  h2o_prefill::PrefillContext context(model.config().num_hidden_layers,
                                      tokens + std::min(max_new_tokens, room), settings);

  const auto all_logits = [&](const at::Tensor& token_ids) {
    context.reset();
    return model.logits(model.forward(token_ids, context).squeeze(0));
  };
  const auto last_logits = [&](const at::Tensor& token_ids) {
    return model.logits(model.forward(token_ids, context).select(1, -1));
  };
  if (window > 0) {
    examples::print_perplexity(ids, window, all_logits);
  } else if (const auto path = arguments.text("--save-logits", ""); !path.empty()) {
    save(all_logits(ids), path);
  } else {
    examples::continue_greedily(ids,
                                {.max_new_tokens = max_new_tokens,
                                 .room = room,
                                 .end_ids = model.config().eos_token_id,
                                 .sparse = settings.is_sparse_call(/*past=*/0, tokens)},
                                last_logits, last_logits);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_example(
      &run,
      "llama FOLDER IDS|- [--max-new-tokens N] [--perplexity WINDOW] [--save-logits FILE.pt] "
      "[--settings TEXT] [--dense] [--threads N]",
      {"--max-new-tokens", "--perplexity", "--settings", "--save-logits"}, argc, argv);
}
