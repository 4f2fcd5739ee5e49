// Prefills the prompt of a real model without Python: with the queries, keys, values and token ids
// that save_prompt.py saved of it under h2o_prefill.enable(), PrefillContext and the TorchScript
// module give the same outputs, to the bit.
//
//   replay_prompt prompt.pt attention.pt
#include <ATen/ATen.h>
#include <h2o_prefill/prefill_context.h>
#include <torch/script.h>

#include <array>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

c10::impl::GenericDict read_dict(const char* path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "cannot read ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes).toGenericDict();
}

// Keys, values, scores, memory set and errors of a layer, as the module changes them in place.
using Buffers = std::array<at::Tensor, 5>;

Buffers empty_buffers(const at::Tensor& key, int64_t capacity, int64_t memory_size) {
  const int64_t heads = key.size(1), head_dim = key.size(3);
  return {at::zeros({1, heads, capacity, head_dim}, key.options()),
          at::zeros({1, heads, capacity, head_dim}, key.options()),
          at::zeros({1, heads, capacity}, at::kFloat),
          at::full({1, heads, memory_size}, -1, at::kInt),
          at::zeros({1, heads, h2o_prefill::kErrorFields})};
}

// Returns whether all outputs are the same.
bool run(const char* path, const char* module_path) {
  const c10::InferenceMode inference;
  const auto replay = read_dict(path);
  const auto settings = h2o_prefill::PrefillConfig::parse(replay.at("settings").toStringRef());
  const double scale = replay.at("scale").toDouble();
  const auto token_ids = replay.at("token_ids").toTensor();
  const auto calls = replay.at("calls").toListRef();
  const auto num_layers = static_cast<int64_t>(calls.at(0).toListRef().size());

  h2o_prefill::PrefillContext context(num_layers, /*max_tokens=*/token_ids.size(1), settings);
  auto module = torch::jit::load(module_path);
  std::vector<Buffers> buffers(num_layers);
  const auto position = at::zeros({2}, at::kLong);
  int64_t different = 0;
  for (const auto& call : calls) {
    const auto layers = call.toListRef();
    const auto tensor = [&](int64_t layer, const char* name) {
      return layers.at(layer).toGenericDict().at(name).toTensor();
    };
    const int64_t past = context.length(), tokens = tensor(0, "query").size(2);
    context.begin(token_ids.narrow(1, past, tokens));
    const auto recall =
        module.run_method("find_recalled", token_ids.narrow(1, 0, past + tokens), past);
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      const auto query = tensor(layer, "query"), key = tensor(layer, "key"),
                 value = tensor(layer, "value"), expected = tensor(layer, "out");
      if (past == 0) {
        buffers[layer] =
            empty_buffers(key, token_ids.size(1), settings.of_layer(layer).memory_size());
      }
      const auto& [keys, values, scores, memory, errors] = buffers[layer];
      const auto scripted =
          module.run_method("attend_", query, key, value, keys, values, scores, memory, position,
                            scale, recall, layer, c10::IValue(), /*softcap=*/0.0, errors);
      const auto out = context.attend(layer, query, key, value, scale);
      if (at::equal(out, expected) && at::equal(scripted.toTensor(), expected)) continue;
      ++different;
      std::cout << "layer " << layer << " is not the same in the call of " << tokens
                << " tokens: " << (out - expected).abs().max().item<double>() << ", scripted "
                << (scripted.toTensor() - expected).abs().max().item<double>() << '\n';
    }
    module.run_method("advance_", position, tokens);
  }
  std::cout << settings.to_string() << ", " << context.length() << " tokens in " << calls.size()
            << " calls, " << num_layers << " layers: " << different << " outputs differ\n";
  return different == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: replay_prompt prompt.pt attention.pt\n";
    return 2;
  }
  return run(argv[1], argv[2]) ? 0 : 1;
}
