#include "llama_config.h"

#include <cmath>
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

// What `read` makes of a file, which is named in what it throws.
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

// By reference: to copy a value that is nested deeply may take more stack than there is.
const json& find(const json& object, const char* name) {
  static const json none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

// A field that is missing or null has the default.
template <typename Value>
Value field(const json& object, const char* name, std::optional<Value> otherwise = std::nullopt) {
  const json& value = find(object, name);
  if (value.is_null()) {
    if (!otherwise) fail("there is no ", name);
    return *otherwise;
  }
  try {
    return value.get<Value>();
  } catch (const json::exception&) {
    fail(name, " must be of another type, got ", value.type_name());
  }
}

double positive(const json& object, const char* name,
                std::optional<double> otherwise = std::nullopt) {
  const auto value = field<double>(object, name, otherwise);
  if (!(value > 0)) fail(name, " must be above 0, got ", value);
  return value;
}

// At least 1, and small enough for products of two.
int64_t count(const json& object, const char* name,
              std::optional<double> otherwise = std::nullopt) {
  const double value = positive(object, name, otherwise);
  if (value != std::floor(value) || value > std::numeric_limits<int32_t>::max()) {
    fail(name, " must be a whole number below 2^31, got ", value);
  }
  return static_cast<int64_t>(value);
}

void expect(const char* name, const std::string& value, const std::string& wanted) {
  if (value != wanted) fail(name, " must be ", wanted, ", got ", value);
}

std::optional<at::ScalarType> read_dtype(const std::string& name) {
  static const std::map<std::string, std::optional<at::ScalarType>> dtypes{
      {"", std::nullopt},
      {"float32", at::kFloat},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16}};
  const auto found = dtypes.find(name);
  if (found == dtypes.end()) fail("dtype must be float32, float16 or bfloat16, got ", name);
  return found->second;
}

// transformers 5 has rope_parameters, with rope_theta in it; transformers 4 rope_scaling, beside
// it.
void read_rope(const json& config, LlamaConfig& result) {
  const json& newer = find(config, "rope_parameters");
  const json& rope = newer.is_null() ? find(config, "rope_scaling") : newer;
  if (!rope.is_null() && !rope.is_object()) fail("rope_parameters must be an object");
  result.rope_theta = positive(rope, "rope_theta", positive(config, "rope_theta", 10000));
  if (positive(rope, "partial_rotary_factor", 1) != 1) fail("partial_rotary_factor must be 1");
  const auto type =
      field<std::string>(rope, "rope_type", field<std::string>(rope, "type", "default"));
  if (type == "default") return;
  if (type != "llama3") fail("rope_type must be default or llama3, got ", type);
  const Llama3Scaling scaling{positive(rope, "factor"), positive(rope, "low_freq_factor"),
                              positive(rope, "high_freq_factor"),
                              positive(rope, "original_max_position_embeddings")};
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    fail("high_freq_factor must be above low_freq_factor");
  }
  result.rope_scaling = scaling;
}

// One id or several.
std::vector<int64_t> read_end_ids(const json& config) {
  std::vector<int64_t> ids;
  for (const json& id : find(config, "eos_token_id")) {  // of a number: itself
    if (!id.is_number_integer()) fail("eos_token_id must be token ids");
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

LlamaConfig read_fields(const json& config) {
  expect("model_type", field<std::string>(config, "model_type"), "llama");
  expect("hidden_act", field<std::string>(config, "hidden_act", "silu"), "silu");
  if (!find(config, "quantization_config").is_null()) {
    fail("the weights are quantised: save the model without quantization_config");
  }
  LlamaConfig result{};
  result.vocab_size = count(config, "vocab_size");
  result.hidden_size = count(config, "hidden_size");
  result.intermediate_size = count(config, "intermediate_size");
  result.num_hidden_layers = count(config, "num_hidden_layers");
  const int64_t heads = result.num_attention_heads = count(config, "num_attention_heads");
  result.num_key_value_heads = count(config, "num_key_value_heads", heads);
  if (heads % result.num_key_value_heads != 0) {
    fail("num_key_value_heads must be a divisor of num_attention_heads");
  }
  result.head_dim = count(config, "head_dim", result.hidden_size / heads);
  if (result.head_dim % 2 != 0) fail("head_dim must be even");
  result.max_position_embeddings = count(config, "max_position_embeddings");
  result.rms_norm_eps = positive(config, "rms_norm_eps", 1e-6);
  read_rope(config, result);
  result.attention_bias = field<bool>(config, "attention_bias", false);
  result.mlp_bias = field<bool>(config, "mlp_bias", false);
  result.tie_word_embeddings = field<bool>(config, "tie_word_embeddings", false);
  const auto older = field<std::string>(config, "torch_dtype", "");
  result.dtype = read_dtype(field<std::string>(config, "dtype", older));
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
  // What generate() of transformers goes by.
  if (fs::exists(generation)) result.eos_token_id = read_file(generation, &read_end_ids);
  return result;
}

}  // namespace examples
