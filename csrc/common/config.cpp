#include "h2o_prefill/config.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <set>

#include "common/config_fields.h"
#include "common/rules.h"

namespace h2o_prefill {
namespace {

struct Preset {
  const char* name;
  PrefillConfig config;
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"h2o", {}},
      {"recommended",
       {.local_window = 512,
        .heavy_budget = 256,
        .gqa_reduce = "max",
        .recall = 6,
        .recall_block = 64,
        .recall_suffix = 2,
        .recall_span = 4,
        .recall_max_count = 32}},
  };
  return all;
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : separator) + part;
  return all;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

const char* const kNone = "none";

// Values as texts have them. parse_value() gives what the text means, or nothing.
std::string to_text(int64_t value) { return std::to_string(value); }
std::string to_text(bool value) { return value ? "true" : "false"; }
std::string to_text(const std::string& value) { return value; }
std::string to_text(const std::optional<int64_t>& value) {
  return value ? std::to_string(*value) : kNone;
}
std::string to_text(const std::vector<int64_t>& values) {
  std::vector<std::string> texts;
  for (const int64_t value : values) texts.push_back(std::to_string(value));
  return texts.empty() ? kNone : join(texts, "+");
}

bool parse_value(std::string_view text, int64_t& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}
bool parse_value(std::string_view text, bool& value) {
  value = text == "true" || text == "1";
  return value || text == "false" || text == "0";
}
bool parse_value(std::string_view text, std::string& value) {
  value = text;
  return true;
}
bool parse_value(std::string_view text, std::optional<int64_t>& value) {
  value.reset();
  return text == kNone || parse_value(text, value.emplace());
}
bool parse_value(std::string_view text, std::vector<int64_t>& values) {
  values.clear();
  if (text == kNone) return true;
  for (const std::string_view part : split(text, '+')) {
    if (!parse_value(part, values.emplace_back())) return false;
  }
  return true;
}

const char* form_of(const int64_t&) { return "an int"; }
const char* form_of(const bool&) { return "true or false"; }
const char* form_of(const std::string&) { return "a text"; }
const char* form_of(const std::optional<int64_t>&) { return "an int or none"; }
const char* form_of(const std::vector<int64_t>&) { return "layers like 7+17, or none"; }

std::vector<std::string> field_names() {
  std::vector<std::string> names;
  for_each_field([&](const auto& field) { names.push_back(field.name); });
  return names;
}

void set_field(PrefillConfig& config, std::string_view name, std::string_view text) {
  bool known = false;
  for_each_field([&](const auto& field) {
    if (name != field.name) return;
    known = true;
    auto& value = config.*field.member;
    TORCH_CHECK_VALUE(parse_value(text, value), name, " must be ", form_of(value), ", got \"", text,
                      '"');
  });
  TORCH_CHECK_VALUE(known, '"', name, "\" is no setting of PrefillConfig, whose settings are ",
                    join(field_names(), ", "));
}

// A text like "a=1,b=2" by field.
std::set<std::string_view> set_fields(PrefillConfig& config, std::string_view text) {
  std::set<std::string_view> given;
  for (const std::string_view part : split(text, ',')) {
    const size_t equals = part.find('=');
    TORCH_CHECK_VALUE(
        equals != std::string_view::npos,
        "settings must be a preset and fields like \"recommended,local_window=256,wide_layers=7+17"
        "\", got \"",
        part, "\" where a field is expected");
    const std::string_view name = part.substr(0, equals);
    set_field(config, name, part.substr(equals + 1));
    TORCH_CHECK_VALUE(given.insert(name).second, name, " must be given once, got \"", text, '"');
  }
  return given;
}

// The fields in which two configs differ, as texts.
std::vector<std::string> differences(const PrefillConfig& config, const PrefillConfig& base) {
  std::vector<std::string> texts;
  for_each_field([&](const auto& field) {
    if (config.*field.member == base.*field.member) return;
    texts.push_back(std::string(field.name) + "=" + to_text(config.*field.member));
  });
  return texts;
}

struct Bounds {
  int64_t least;
  int64_t most;
};

void check_range(const char* name, int64_t value, const Bounds& bounds) {
  check_at_least(name, value, bounds.least);
  check_at_most(name, value, bounds.most);
}
void check_range(const char* /*name*/, bool /*value*/, const Bounds& /*bounds*/) {}
void check_range(const char* /*name*/, const std::string& /*value*/, const Bounds& /*bounds*/) {}
void check_range(const char* name, const std::optional<int64_t>& value, const Bounds& bounds) {
  if (value) check_range(name, *value, bounds);
}
void check_range(const char* name, const std::vector<int64_t>& values, const Bounds& bounds) {
  for (const int64_t value : values) check_range(name, value, bounds);
}

bool contains(const std::vector<int64_t>& layers, int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

}  // namespace

const std::vector<std::string>& PrefillConfig::preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Preset& preset : presets()) all.push_back(preset.name);
    return all;
  }();
  return names;
}

PrefillConfig PrefillConfig::preset(std::string_view name) {
  for (const Preset& preset : presets()) {
    if (name == preset.name) return preset.config;
  }
  TORCH_CHECK_VALUE(false, "preset must be one of ", join(preset_names(), ", "), ", got \"", name,
                    '"');
}

PrefillConfig PrefillConfig::parse(std::string_view text) {
  const size_t comma = text.find(',');
  const std::string_view first = text.substr(0, comma);
  if (first.find('=') != std::string_view::npos) return PrefillConfig().with(text);
  const PrefillConfig base = preset(first);
  return comma == std::string_view::npos ? base : base.with(text.substr(comma + 1));
}

PrefillConfig PrefillConfig::with(std::string_view fields) const {
  PrefillConfig config = *this;
  const auto given = set_fields(config, fields);
  if (given.count("chunk_size") && !given.count("recall_block") && config.recall > 0 &&
      config.chunk_size > 0) {
    config.recall_block = std::gcd(config.chunk_size, config.recall_block);
  }
  config.check();
  return config;
}

std::string PrefillConfig::to_string() const {
  std::vector<std::string> shortest;
  for (const Preset& preset : presets()) {
    std::vector<std::string> parts = differences(*this, preset.config);
    parts.insert(parts.begin(), preset.name);
    if (shortest.empty() || parts.size() < shortest.size()) shortest = std::move(parts);
  }
  return join(shortest, ",");
}

std::string PrefillConfig::to_fields() const {
  std::vector<std::string> parts;
  for_each_field([&](const auto& field) {
    parts.push_back(std::string(field.name) + "=" + to_text(this->*field.member));
  });
  return join(parts, ",");
}

void PrefillConfig::check() const {
  for_each_field([&](const auto& field) {
    check_range(field.name, this->*field.member, {field.least, field.most});
  });
  if (!wide_layers.empty()) {
    check_at_most("wide_factor * local_window", wide_factor * local_window, kLargestBudget);
    check_at_most("wide_factor * heavy_budget", wide_factor * heavy_budget, kLargestBudget);
  }
  check_gqa_reduce(gqa_reduce);
  if (recall > 0) check_recall_block(chunk_size, recall_block);
}

std::vector<std::string> PrefillConfig::advice() const {
  std::vector<std::string> all;
  if (memory_size() >= chunk_size) {
    all.push_back("the memory set (" + std::to_string(memory_size()) +
                  " positions) is not smaller than chunk_size (" + std::to_string(chunk_size) +
                  "): sparse prefill saves less than it could");
  }
  if (memory_size() == 0 && !block_diagonal) {
    all.push_back(
        "the memory set is empty (K + L + H = 0), so every call is dense: block_diagonal=true "
        "attends inside chunks alone");
  }
  return all;
}

void PrefillConfig::validate() const {
  check();
  if (const auto sentences = advice(); !sentences.empty()) {
    TORCH_WARN_ONCE("h2o_prefill: ", join(sentences, "; "));
  }
}

PrefillConfig PrefillConfig::of_layer(int64_t layer) const {
  PrefillConfig config = *this;
  if (!contains(wide_layers, layer)) return config;
  config.local_window *= wide_factor;
  config.heavy_budget *= wide_factor;
  config.wide_layers.clear();
  return config;
}

bool PrefillConfig::is_dense_layer(int64_t layer) const { return contains(dense_layers, layer); }

bool PrefillConfig::is_long_call(int64_t past, int64_t num_tokens) const {
  const bool decodes = num_tokens == 1 && past > 0;
  return num_tokens >= sparse_from() && !decodes;
}

bool PrefillConfig::is_sparse_call(int64_t past, int64_t num_tokens) const {
  return is_long_call(past, num_tokens) && (memory_size() > 0 || block_diagonal);
}

bool PrefillConfig::is_sparse(int64_t layer, int64_t past, int64_t num_tokens) const {
  return is_sparse_call(past, num_tokens) && !is_dense_layer(layer);
}

int64_t PrefillConfig::last_chunk_begin(int64_t past, int64_t num_tokens) const {
  check_call_tokens(past, num_tokens);
  return num_tokens == 0 ? past : past + (num_tokens - 1) / chunk_size * chunk_size;
}

}  // namespace h2o_prefill
