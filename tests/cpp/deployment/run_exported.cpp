// Runs a model that was exported in Python, without Python: a prompt in several calls, then
// decoding, by the one graph that the file holds.
//
//   run_exported model.pt replay.pt    a TorchScript file
//   run_exported model.pt2 replay.pt   an AOTInductor package
//
// export_model.py writes all three; replay.pt says what the model answered in Python.
#include <ATen/ATen.h>
#include <h2o_prefill/library.h>
#include <h2o_prefill/ops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"

namespace {

using h2o_prefill::RecallLists;

// Logits [1, vocabulary] after the last of token_ids [1, T]; buffers and position are changed in
// place.
class Model {
 public:
  virtual ~Model() = default;
  virtual at::Tensor forward(const at::Tensor& token_ids, const std::vector<at::Tensor>& buffers,
                             const at::Tensor& position, const RecallLists& recall) = 0;
};

class ScriptedModel : public Model {
 public:
  explicit ScriptedModel(const std::string& file) : module_(torch::jit::load(file)) {}

  at::Tensor forward(const at::Tensor& token_ids, const std::vector<at::Tensor>& buffers,
                     const at::Tensor& position, const RecallLists& recall) override {
    return module_
        .forward({token_ids, buffers, position,
                  std::make_tuple(recall.offsets, recall.positions, recall.visible_from)})
        .toTensor();
  }

 private:
  torch::jit::Module module_;
};

class CompiledModel : public Model {
 public:
  explicit CompiledModel(const std::string& file) : loader_(file) {}

  at::Tensor forward(const at::Tensor& token_ids, const std::vector<at::Tensor>& buffers,
                     const at::Tensor& position, const RecallLists& recall) override {
    std::vector<at::Tensor> inputs{token_ids};
    inputs.insert(inputs.end(), buffers.begin(), buffers.end());
    inputs.insert(inputs.end(), {position, recall.offsets, recall.positions, recall.visible_from});
    return loader_.run(inputs).at(0);
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

c10::impl::GenericDict read_replay(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) examples::fail("cannot read ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes).toGenericDict();
}

// Returns whether the model answers as it did in Python.
bool run(const std::string& path, const char* replay_path) {
  // An exported model names its ops by text: this makes sure that they are registered.
  h2o_prefill::init();
  const c10::InferenceMode inference;
  std::unique_ptr<Model> model;
  if (path.ends_with(".pt2")) {
    model = std::make_unique<CompiledModel>(path);
  } else {
    model = std::make_unique<ScriptedModel>(path);
  }
  const auto replay = read_replay(replay_path);
  const auto settings = h2o_prefill::PrefillConfig::parse(replay.at("settings").toStringRef());
  std::vector<at::Tensor> buffers;
  for (const auto& buffer : replay.at("buffers").toListRef()) buffers.push_back(buffer.toTensor());
  const auto expected_ids = replay.at("token_ids").toTensor();
  const auto expected_logits = replay.at("logits").toTensor();
  const auto calls = replay.at("calls").toTensor();

  auto token_ids = replay.at("prompt").toTensor();
  const auto position = at::zeros({2}, at::kLong);
  RecallLists recall;
  double error = 0;
  for (int64_t call = 0; call < expected_logits.size(0); ++call) {
    const int64_t begin = position[0].item<int64_t>();
    const int64_t tokens = call < calls.size(0) ? calls[call].item<int64_t>() : 1;
    // A dense call does not look at the lists; those of the last sparse call will do.
    if (settings.is_sparse_call(begin, tokens)) {
      recall = h2o_prefill::lexical_recall(token_ids.narrow(1, 0, begin + tokens), begin, settings);
    }
    const auto logits =
        model->forward(token_ids.narrow(1, begin, tokens), buffers, position, recall);
    error = std::max(error, (logits - expected_logits[call]).abs().max().item<double>());
    if (begin + tokens == token_ids.size(1)) {
      token_ids = at::cat({token_ids, logits.argmax(-1, /*keepdim=*/true)}, 1);
    }
  }
  const bool same = at::equal(token_ids, expected_ids) && error < 1e-4;
  std::cout << path << ": " << expected_logits.size(0) << " calls, " << position[0].item<int64_t>()
            << " tokens, logits differ by " << error
            << " from Python's: " << (same ? "the same tokens\n" : "NOT the same\n");
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: run_exported MODEL.pt|MODEL.pt2 replay.pt\n";
    return 2;
  }
  return examples::report_errors([&] { return run(argv[1], argv[2]) ? 0 : 1; });
}
