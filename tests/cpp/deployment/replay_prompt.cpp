// Prefills the prompt of a real model in C++: with the queries, keys, values and token ids that
// save_prompt.py saved of it under h2o_prefill.enable(), PrefillContext gives the same outputs, to
// the bit.
//
//   replay_prompt prompt.pt
#include <ATen/ATen.h>
#include <h2o_prefill/prefill_context.h>
#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "errors.h"

namespace {

c10::impl::GenericDict read_dict(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) examples::fail("cannot read ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes).toGenericDict();
}

// Returns whether all outputs are the same.
bool run(const char* path) {
  const c10::InferenceMode inference;
  const auto replay = read_dict(path);
  const auto settings = h2o_prefill::PrefillConfig::parse(replay.at("settings").toStringRef());
  const double scale = replay.at("scale").toDouble();
  const auto token_ids = replay.at("token_ids").toTensor();
  const auto calls = replay.at("calls").toListRef();
  const auto num_layers = static_cast<int64_t>(calls.at(0).toListRef().size());

  h2o_prefill::PrefillContext context(num_layers, /*max_tokens=*/token_ids.size(1), settings);
  int64_t different = 0;
  for (const auto& call : calls) {
    const auto layers = call.toListRef();
    const auto tensor = [&](int64_t layer, const char* name) {
      return layers.at(layer).toGenericDict().at(name).toTensor();
    };
    const int64_t tokens = tensor(0, "query").size(2);
    context.begin(token_ids.narrow(1, context.length(), tokens));
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      const auto out = context.attend(layer, tensor(layer, "query"), tensor(layer, "key"),
                                      tensor(layer, "value"), scale);
      if (at::equal(out, tensor(layer, "out"))) continue;
      ++different;
      std::cout << "layer " << layer << " is not the same in the call of " << tokens
                << " tokens: " << (out - tensor(layer, "out")).abs().max().item<double>() << '\n';
    }
  }
  std::cout << settings.to_string() << ", " << context.length() << " tokens in " << calls.size()
            << " calls, " << num_layers << " layers: " << different << " outputs differ\n";
  return different == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: replay_prompt prompt.pt\n";
    return 2;
  }
  return examples::report_errors([&] { return run(argv[1]) ? 0 : 1; });
}
