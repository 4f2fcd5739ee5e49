#include "llama_config.h"

#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "errors.h"

namespace examples {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Returns `read` of a JSON file; errors name the file.
template <typename Result>
Result read_file(const fs::path& file, Result (*read)(const json& object)) {
  std::ifstream in(file, std::ios::binary);
  const json object = json::parse(in, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) fail_damaged(file.string());
  try {
    return read(object);
  } catch (const std::exception& error) {
    fail(file.string(), ": ", error.what());
  }
}

// A field that is missing or null has the default.
template <typename Value>
Value field(const json& object, const char* name, Value otherwise) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) return otherwise;
  try {
    return found->get<Value>();
  } catch (const json::exception&) {
    fail(name, " must be of another type, got ", found->type_name());
  }
}

// At least 1, and small enough for products of two.
int64_t size(const json& object, const char* name, int64_t otherwise = 0) {
  const auto value = field(object, name, otherwise);
  if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
    fail(name, " must be in [1, 2^31), got ", value);
  }
  return value;
}

void expect(const json& object, const char* name, const std::string& wanted) {
  const auto value = field(object, name, wanted);
  if (value != wanted) fail(name, " must be ", wanted, ", got ", value);
}

std::optional<at::ScalarType> read_dtype(const json& config) {
  static const std::map<std::string, std::optional<at::ScalarType>> dtypes{
      {"", std::nullopt},
      {"float32", at::kFloat},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16}};
  const std::string name = field(config, "dtype", field<std::string>(config, "torch_dtype", ""));
  const auto found = dtypes.find(name);
  if (found == dtypes.end()) fail("dtype must be float32, float16 or bfloat16, got ", name);
  return found->second;
}

// transformers 5 has rope_parameters, with rope_theta in it; transformers 4 rope_scaling, beside
// it.
void read_rope(const json& config, LlamaConfig& result) {
  const json rope =
      field<json>(config, "rope_parameters", field<json>(config, "rope_scaling", json::object()));
  result.rope_theta = field(rope, "rope_theta", field(config, "rope_theta", 10000.0));
  if (field(rope, "partial_rotary_factor", 1.0) != 1) fail("partial_rotary_factor must be 1");
  const std::string type =
      field<std::string>(rope, "rope_type", field<std::string>(rope, "type", "default"));
  if (type == "default") return;
  if (type != "llama3") fail("rope_type must be default or llama3, got ", type);
  result.rope_scaling = {
      .factor = rope.at("factor"),
      .low_freq_factor = rope.at("low_freq_factor"),
      .high_freq_factor = rope.at("high_freq_factor"),
      .original_max_position_embeddings = rope.at("original_max_position_embeddings")};
}

// One id or several.
std::vector<int64_t> read_end_ids(const json& config) {
  const auto ids = field(config, "eos_token_id", json::array());
  return ids.is_array() ? ids.get<std::vector<int64_t>>() : std::vector{ids.get<int64_t>()};
}

LlamaConfig read_fields(const json& config) {
  expect(config, "model_type", "llama");
  expect(config, "hidden_act", "silu");
  if (!field(config, "quantization_config", json()).is_null()) {
    fail("the weights are quantised: save the model without quantization_config");
  }
  LlamaConfig result{};
  result.vocab_size = size(config, "vocab_size");
  result.hidden_size = size(config, "hidden_size");
  result.intermediate_size = size(config, "intermediate_size");
  result.num_hidden_layers = size(config, "num_hidden_layers");
  const int64_t heads = result.num_attention_heads = size(config, "num_attention_heads");
  result.num_key_value_heads = size(config, "num_key_value_heads", heads);
  result.head_dim = size(config, "head_dim", result.hidden_size / heads);
  result.max_position_embeddings = size(config, "max_position_embeddings");
  result.rms_norm_eps = field(config, "rms_norm_eps", 1e-6);
  read_rope(config, result);
  result.attention_bias = field(config, "attention_bias", false);
  result.mlp_bias = field(config, "mlp_bias", false);
  result.tie_word_embeddings = field(config, "tie_word_embeddings", false);
  result.dtype = read_dtype(config);
  result.eos_token_id = read_end_ids(config);
  return result;
}

}  // namespace

LlamaConfig read_llama_config(const fs::path& folder) {
  const fs::path file = folder / "config.json", generation = folder / "generation_config.json";
  if (!fs::exists(file)) {
    fail("there is no ", file.string(), ": give a folder that save_pretrained wrote");
  }
  LlamaConfig result = read_file(file, &read_fields);
  // transformers' generate() prefers these.
  if (fs::exists(generation)) result.eos_token_id = read_file(generation, &read_end_ids);
  return result;
}

}  // namespace examples
