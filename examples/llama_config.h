// The config.json of a Llama model. Names are those of transformers' LlamaConfig, units are tokens
// and features.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace examples {

// Rope type "llama3": long wavelengths are stretched by `factor`, short ones are unchanged, and
// those between are interpolated.
struct Llama3Scaling {
  double factor;
  double low_freq_factor;
  double high_freq_factor;
  double original_max_position_embeddings;
};

struct LlamaConfig {
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_hidden_layers;
  int64_t num_attention_heads;
  int64_t num_key_value_heads;
  int64_t head_dim;
  int64_t max_position_embeddings;
  double rms_norm_eps;
  double rope_theta;
  std::optional<Llama3Scaling> rope_scaling;  // none: rope type "default"
  bool attention_bias;
  bool mlp_bias;
  bool tie_word_embeddings;
  std::optional<at::ScalarType> dtype;  // none: that of the weights
  std::vector<int64_t> eos_token_id;    // also from generation_config.json, which comes first
};

// Reads a folder that `save_pretrained` wrote, of transformers 4 or 5. Throws std::runtime_error,
// in one line that names the file and the field, if there is none or it describes something else
// than the Llama of llama_model.h.
LlamaConfig read_llama_config(const std::filesystem::path& folder);

}  // namespace examples
