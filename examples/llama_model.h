// A Llama model of a Hugging Face folder in plain LibTorch, whose attention is a PrefillContext:
//
//   examples::LlamaModel model("SmolLM2-135M-Instruct");
//   h2o_prefill::PrefillContext context(model.config().num_hidden_layers, /*max_tokens=*/8192);
//   at::Tensor hidden = model.forward(prompt, context);        // sparse where the prompt is long
//   at::Tensor token = model.logits(hidden.select(1, -1)).argmax(-1, /*keepdim=*/true);
//   hidden = model.forward(token, context);                    // and so on: decodes
//
// The model itself does not change: each text has a context, and contexts may be on several
// threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <h2o_prefill/prefill_context.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "llama_config.h"

namespace examples {

class LlamaModel {
 public:
  // Reads config.json and the weights. Throws std::runtime_error, in one line, if there is no such
  // folder, it holds another kind of model, or its files are damaged.
  explicit LlamaModel(const std::filesystem::path& folder);

  const LlamaConfig& config() const { return config_; }

  // Runs the next tokens of the context's text, int64 [1, T] with T >= 1. Returns their hidden
  // states after the final norm, [1, T, hidden_size]. Throws std::runtime_error if ids are out of
  // the vocabulary, c10::Error if the context has no room for them.
  at::Tensor forward(const at::Tensor& token_ids, h2o_prefill::PrefillContext& context) const;

  // Logits [..., vocab_size] of hidden states [..., hidden_size] that forward() returned.
  at::Tensor logits(const at::Tensor& hidden) const;

 private:
  struct Linear {
    at::Tensor weight;  // [out, in]
    std::optional<at::Tensor> bias;
    at::Tensor operator()(const at::Tensor& x) const;
  };
  struct Layer {
    at::Tensor attention_norm, mlp_norm;
    Linear query, key, value, out;
    Linear gate, up, down;
  };
  // Cosines and sines for the positions of a call, [T, head_dim].
  struct Rotation {
    at::Tensor cos, sin;
  };

  at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight) const;
  Rotation rotation_of(int64_t past, int64_t tokens) const;

  LlamaConfig config_;
  at::Tensor embedding_;  // [vocab_size, hidden_size]
  std::vector<Layer> layers_;
  at::Tensor norm_;
  Linear head_;
  at::Tensor frequencies_;  // float32 [head_dim / 2], radians per token
};

}  // namespace examples
