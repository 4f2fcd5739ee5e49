#include "llama_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string>

#include "safetensors.h"
#include "text_tasks.h"

namespace examples {
namespace {

// Angles per token of rotary position embeddings, as transformers computes them, in float32.
at::Tensor rope_frequencies(const LlamaConfig& config) {
  const auto powers = at::arange(0, config.head_dim, 2, at::kFloat) / config.head_dim;
  const auto plain = 1.0 / at::pow(config.rope_theta, powers);
  if (!config.rope_scaling) return plain;
  const Llama3Scaling& scaling = *config.rope_scaling;
  // Periods in the context that the model was first trained with: 1 where the frequency stays.
  const auto periods = plain * (scaling.original_max_position_embeddings / (2 * M_PI));
  const auto kept =
      ((periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor))
          .clamp(0, 1);
  return (1 - kept) * plain / scaling.factor + kept * plain;
}

// Rotates x [1, H, T, D]; dimension i and i + D/2 are a pair.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

}  // namespace

LlamaModel::LlamaModel(const std::filesystem::path& folder) : config_(read_llama_config(folder)) {
  const LlamaConfig& c = config_;
  const Safetensors file(folder);
  const auto dtype = c.dtype ? *c.dtype : file.dtype("model.embed_tokens.weight");
  const auto weight = [&](const std::string& name, at::IntArrayRef shape) {
    return file.read(name, shape).to(dtype);
  };
  const auto linear = [&](const std::string& name, int64_t in, int64_t out, bool bias) {
    Linear result{.weight = weight(name + ".weight", {out, in}), .bias = std::nullopt};
    if (bias) result.bias = weight(name + ".bias", {out});
    return result;
  };

  embedding_ = weight("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  const int64_t query_width = c.num_attention_heads * c.head_dim;
  const int64_t kv_width = c.num_key_value_heads * c.head_dim;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    layers_.push_back({
        .attention_norm = weight(layer + "input_layernorm.weight", {c.hidden_size}),
        .mlp_norm = weight(layer + "post_attention_layernorm.weight", {c.hidden_size}),
        .query = linear(attention + "q_proj", c.hidden_size, query_width, c.attention_bias),
        .key = linear(attention + "k_proj", c.hidden_size, kv_width, c.attention_bias),
        .value = linear(attention + "v_proj", c.hidden_size, kv_width, c.attention_bias),
        .out = linear(attention + "o_proj", query_width, c.hidden_size, c.attention_bias),
        .gate = linear(mlp + "gate_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        .up = linear(mlp + "up_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        .down = linear(mlp + "down_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
    });
  }
  norm_ = weight("model.norm.weight", {c.hidden_size});
  head_ = c.tie_word_embeddings ? Linear{.weight = embedding_, .bias = std::nullopt}
                                : linear("lm_head", c.hidden_size, c.vocab_size, /*bias=*/false);
  frequencies_ = rope_frequencies(c);
}

at::Tensor LlamaModel::forward(const at::Tensor& token_ids,
                               h2o_prefill::PrefillContext& context) const {
  check_token_ids(token_ids, config_.vocab_size);
  const auto [cos, sin] = rotation_of(context.length(), token_ids.size(1));
  at::Tensor hidden = at::embedding(embedding_, token_ids);
  // Once for all layers: finds the keys that the tokens recall.
  context.begin(token_ids);
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const Layer& layer = layers_[i];
    const at::Tensor x = rms_norm(hidden, layer.attention_norm);
    const auto heads_of = [&](const Linear& projection) {  // [1, heads, T, head_dim]
      return projection(x).unflatten(-1, {-1, config_.head_dim}).transpose(1, 2);
    };
    // Keys are cached with their rotation, so that one keeps its position wherever it is used.
    const at::Tensor attended =
        context.attend(i, rotate(heads_of(layer.query), cos, sin),
                       rotate(heads_of(layer.key), cos, sin), heads_of(layer.value));
    hidden = hidden + layer.out(attended.transpose(1, 2).flatten(2));

    const at::Tensor y = rms_norm(hidden, layer.mlp_norm);
    hidden = hidden + layer.down(at::silu(layer.gate(y)) * layer.up(y));
  }
  return rms_norm(hidden, norm_);
}

at::Tensor LlamaModel::logits(const at::Tensor& hidden) const { return head_(hidden); }

at::Tensor LlamaModel::Linear::operator()(const at::Tensor& x) const {
  return at::linear(x, weight, bias);
}

// In float32, whatever the dtype of the model, as in transformers.
at::Tensor LlamaModel::rms_norm(const at::Tensor& x, const at::Tensor& weight) const {
  const at::Tensor wide = x.to(at::kFloat);
  const auto scale = (wide.square().mean(-1, /*keepdim=*/true) + config_.rms_norm_eps).rsqrt();
  return weight * (wide * scale).to(x.dtype());
}

LlamaModel::Rotation LlamaModel::rotation_of(int64_t past, int64_t tokens) const {
  const auto positions = at::arange(past, past + tokens, at::kFloat);
  const auto angles = at::outer(positions, frequencies_).repeat({1, 2});
  return {angles.cos().to(embedding_.dtype()), angles.sin().to(embedding_.dtype())};
}

}  // namespace examples
