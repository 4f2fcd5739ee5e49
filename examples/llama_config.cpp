#include "llama_config.h"

#include <limits>
#include <string>
#include <utility>

#include "fail.h"
#include "json_file.h"

namespace examples {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Fields of an object. A field that is missing or null has the default, if there is one.
class Fields {
 public:
  Fields(const json& object, std::string file) : object_(object), file_(std::move(file)) {}

  bool has(const char* name) const {
    const auto found = object_.find(name);
    return found != object_.end() && !found->is_null();
  }

  const json& get(const char* name) const {
    if (!has(name)) fail(file_, " has no ", name);
    return object_.at(name);
  }

  Fields fields(const char* name) const {
    if (!get(name).is_object()) refuse(name, "an object");
    return {get(name), file_ + ": " + name};
  }

  // At least 1, and small enough for products of two.
  int64_t count(const char* name, std::optional<int64_t> otherwise = std::nullopt) const {
    if (otherwise && !has(name)) return *otherwise;
    const json& value = get(name);
    constexpr uint64_t kMost = std::numeric_limits<int32_t>::max();
    if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 || value.get<uint64_t>() > kMost) {
      refuse(name, "a whole number of at least 1");
    }
    return value.get<int64_t>();
  }

  double number(const char* name, std::optional<double> otherwise = std::nullopt) const {
    if (otherwise && !has(name)) return *otherwise;
    if (!get(name).is_number() || !(get(name).get<double>() > 0)) refuse(name, "a number above 0");
    return get(name).get<double>();
  }

  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (!get(name).is_boolean()) refuse(name, "true or false");
    return get(name).get<bool>();
  }

  std::string text(const char* name, const char* otherwise) const {
    if (!has(name)) return otherwise;
    if (!get(name).is_string()) refuse(name, "a text");
    return get(name).get<std::string>();
  }

  [[noreturn]] void refuse(const char* name, const std::string& wanted) const {
    const json& value = get(name);
    fail(file_, ": ", name, " must be ", wanted, ", got ",
         value.is_structured() ? value.type_name() : value.dump());
  }

 private:
  const json& object_;
  std::string file_;
};

std::optional<at::ScalarType> read_dtype(const Fields& config, const char* name) {
  if (!config.has(name)) return std::nullopt;
  const std::string text = config.text(name, "");
  if (text == "float32") return at::kFloat;
  if (text == "float16") return at::kHalf;
  if (text == "bfloat16") return at::kBFloat16;
  config.refuse(name, "float32, float16 or bfloat16");
}

// transformers 5 has rope_parameters, with rope_theta in it; transformers 4 rope_scaling, beside
// it.
void read_rope(const Fields& config, LlamaConfig& result) {
  result.rope_theta = config.number("rope_theta", 10000);
  const char* name = config.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!config.has(name)) return;
  const Fields rope = config.fields(name);
  result.rope_theta = rope.number("rope_theta", result.rope_theta);
  if (rope.number("partial_rotary_factor", 1) != 1) rope.refuse("partial_rotary_factor", "1");
  const char* key = rope.has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.text(key, "default");
  if (type == "default") return;
  if (type != "llama3") rope.refuse(key, "default or llama3");
  const Llama3Scaling scaling{rope.number("factor"), rope.number("low_freq_factor"),
                              rope.number("high_freq_factor"),
                              rope.number("original_max_position_embeddings")};
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    rope.refuse("high_freq_factor", "above low_freq_factor");
  }
  result.rope_scaling = scaling;
}

// One id or several.
std::vector<int64_t> read_ids(const Fields& config, const char* name) {
  if (!config.has(name)) return {};
  std::vector<int64_t> ids;
  for (const json& id : config.get(name)) {  // of a number: itself
    if (!id.is_number_integer()) config.refuse(name, "token ids");
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

}  // namespace

LlamaConfig read_llama_config(const fs::path& folder) {
  const fs::path file = folder / "config.json";
  if (!fs::is_directory(folder)) fail("there is no folder ", folder.string());
  if (!fs::exists(file)) {
    fail(folder.string(), " has no config.json: give a folder that save_pretrained wrote");
  }
  const json object = read_object(file);
  const Fields config(object, file.string());
  if (config.text("model_type", "") != "llama") config.refuse("model_type", "llama");
  if (config.text("hidden_act", "silu") != "silu") config.refuse("hidden_act", "silu");
  if (config.has("quantization_config")) {
    fail(file.string(), ": the weights are quantised: save the model without quantization_config");
  }

  LlamaConfig result{};
  result.vocab_size = config.count("vocab_size");
  result.hidden_size = config.count("hidden_size");
  result.intermediate_size = config.count("intermediate_size");
  result.num_hidden_layers = config.count("num_hidden_layers");
  const int64_t heads = result.num_attention_heads = config.count("num_attention_heads");
  result.num_key_value_heads = config.count("num_key_value_heads", heads);
  if (heads % result.num_key_value_heads != 0) {
    config.refuse("num_key_value_heads", "a divisor of num_attention_heads");
  }
  result.head_dim = config.count("head_dim", result.hidden_size / heads);
  if (result.head_dim % 2 != 0) fail(file.string(), ": head_dim must be even");
  result.max_position_embeddings = config.count("max_position_embeddings");
  result.rms_norm_eps = config.number("rms_norm_eps", 1e-6);
  read_rope(config, result);
  result.attention_bias = config.flag("attention_bias", false);
  result.mlp_bias = config.flag("mlp_bias", false);
  result.tie_word_embeddings = config.flag("tie_word_embeddings", false);
  result.dtype = read_dtype(config, config.has("dtype") ? "dtype" : "torch_dtype");
  result.eos_token_id = read_ids(config, "eos_token_id");
  // What generate() of transformers goes by.
  if (const fs::path generation = folder / "generation_config.json"; fs::exists(generation)) {
    const json object = read_object(generation);
    result.eos_token_id = read_ids({object, generation.string()}, "eos_token_id");
  }
  return result;
}

}  // namespace examples
