#include "h2o_prefill/config.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <cmath>
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
      {"exact", {.exact = true}},
      {"recommended",
       {.local_window = 512,
        .heavy_budget = 256,
        .gqa_reduce = "max",
        .min_prefill = PrefillConfig::kAuto,
        .recall = 6,
        .recall_characters = 8,
        .error_rows = 8,
        .error_threshold = 0.001,
        .max_widen = 8}},
      {"h2o", {.min_prefill = PrefillConfig::kAuto}},
  };
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
const char* const kAutoText = "auto";

bool is_none(std::string_view text) { return text == kNone || text == "None"; }

// Values as texts have them, and as Python prints them. parse_value() gives the value of a text, or
// nothing.
std::string to_text(int64_t value) { return std::to_string(value); }
std::string to_text(bool value) { return value ? "true" : "false"; }
std::string to_text(const std::string& value) { return value; }
std::string to_text(const std::optional<int64_t>& value) {
  if (value == PrefillConfig::kAuto) return kAutoText;
  return value ? std::to_string(*value) : kNone;
}
std::string to_text(const std::vector<int64_t>& values) {
  std::vector<std::string> texts;
  for (const int64_t value : values) texts.push_back(std::to_string(value));
  return texts.empty() ? kNone : c10::Join("+", texts);
}
std::string to_text(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

template <typename Number>
bool parse_value(std::string_view text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}
bool parse_value(std::string_view text, bool& value) {
  value = text == "true" || text == "True" || text == "1";
  return value || text == "false" || text == "False" || text == "0";
}
bool parse_value(std::string_view text, std::string& value) {
  value = text;
  return true;
}
bool parse_value(std::string_view text, std::optional<int64_t>& value) {
  value.reset();
  if (text == kAutoText) value = PrefillConfig::kAuto;
  if (value || is_none(text)) return true;
  return parse_value(text, value.emplace()) && value != PrefillConfig::kAuto;
}
bool parse_value(std::string_view text, std::vector<int64_t>& values) {
  values.clear();
  if (is_none(text)) return true;
  for (const std::string_view part : split(text, '+')) {
    if (!parse_value(part, values.emplace_back())) return false;
  }
  return true;
}

const char* form_of(const int64_t&) { return "an int"; }
const char* form_of(const double&) { return "a number"; }
const char* form_of(const bool&) { return "true or false"; }
const char* form_of(const std::string&) { return "a text"; }
const char* form_of(const std::optional<int64_t>&) { return "an int, auto or none"; }
const char* form_of(const std::vector<int64_t>&) { return "layers like 7+17, or none"; }

void set_field(PrefillConfig& config, std::string_view name, std::string_view text) {
  bool known = false;
  for_each_field([&](const auto& field) {
    if (name != field.name) return;
    known = true;
    auto& value = config.*field.member;
    TORCH_CHECK_VALUE(parse_value(text, value), name, " must be ", form_of(value), ", got \"",
                      one_line(text), '"');
  });
  const auto names = [](const auto&... fields) {
    return c10::Join(", ", std::vector<std::string>{fields.name...});
  };
  TORCH_CHECK_VALUE(known, '"', one_line(name),
                    "\" is no setting of PrefillConfig, whose settings are ",
                    std::apply(names, kConfigFields));
}

// A text like "a=1,b=2" by field.
void set_fields(PrefillConfig& config, std::string_view text) {
  std::set<std::string_view> names;
  for (const std::string_view part : split(text, ',')) {
    const size_t equals = part.find('=');
    TORCH_CHECK_VALUE(
        equals != std::string_view::npos,
        "settings must be a preset and fields like \"recommended,local_window=256\", got \"",
        one_line(part), "\" where a field is expected");
    const std::string_view name = part.substr(0, equals);
    set_field(config, name, part.substr(equals + 1));
    TORCH_CHECK_VALUE(names.insert(name).second, name, " must be given once, got \"",
                      one_line(text), '"');
  }
}

// The fields as texts; with a base, the ones that differ from it.
std::vector<std::string> field_texts(const PrefillConfig& config,
                                     const PrefillConfig* base = nullptr) {
  std::vector<std::string> texts;
  for_each_field([&](const auto& field) {
    if (base && config.*field.member == base->*field.member) return;
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
  if (value && value != PrefillConfig::kAuto) check_range(name, *value, bounds);
}
void check_range(const char* name, const std::vector<int64_t>& values, const Bounds& bounds) {
  for (const int64_t value : values) check_range(name, value, bounds);
}

void check_range(const char* name, double value, const Bounds& /*bounds*/) {
  TORCH_CHECK_VALUE(value >= 0.0 && std::isfinite(value), name,
                    " must be a finite number >= 0, got ", value);
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
  TORCH_CHECK_VALUE(false, "preset must be one of ", c10::Join(", ", preset_names()), ", got \"",
                    one_line(name), '"');
}

PrefillConfig PrefillConfig::parse(std::string_view text) {
  const size_t comma = text.find(',');
  const std::string_view first = text.substr(0, comma);
  if (first.find('=') != std::string_view::npos) return preset("h2o").with(text);
  const PrefillConfig base = preset(first);
  return comma == std::string_view::npos ? base : base.with(text.substr(comma + 1));
}

PrefillConfig PrefillConfig::with(std::string_view fields) const {
  PrefillConfig config = *this;
  set_fields(config, fields);
  config.check();
  return config;
}

std::string PrefillConfig::to_string() const {
  std::vector<std::string> shortest;
  for (const Preset& preset : presets()) {
    if (preset.config.exact != exact) continue;
    std::vector<std::string> parts = field_texts(*this, &preset.config);
    parts.insert(parts.begin(), preset.name);
    if (shortest.empty() || parts.size() < shortest.size()) shortest = std::move(parts);
  }
  return c10::Join(",", shortest);
}

std::string PrefillConfig::to_fields() const { return c10::Join(",", field_texts(*this)); }

void PrefillConfig::check() const {
  for_each_field([&](const auto& field) {
    check_range(field.name, this->*field.member, {field.least, field.most});
  });
  for (const int64_t budget : {local_window, heavy_budget}) {
    check_at_most("local_window and heavy_budget, multiplied by max_widen,",
                  budget * (widens() ? max_widen : 1), kLargestBudget);
  }
  TORCH_CHECK_VALUE(gqa_reduce == "sum" || gqa_reduce == "max",
                    "gqa_reduce must be \"sum\" or \"max\", got \"", one_line(gqa_reduce), '"');
}

std::vector<std::string> PrefillConfig::advice() const {
  std::vector<std::string> all;
  if (exact) return all;
  const int64_t positions = sink_tokens + local_window + heavy_budget;
  if (positions >= chunk_size) {
    all.push_back("the memory set (" + std::to_string(positions) +
                  " positions) is not smaller than chunk_size (" + std::to_string(chunk_size) +
                  "): sparse prefill saves less than it could");
  }
  if (memory_size() == 0) {
    all.push_back("the memory set is empty (K + L + H = 0), so every call is dense");
  }
  return all;
}

void PrefillConfig::validate() const {
  check();
  if (const auto sentences = advice(); !sentences.empty()) {
    TORCH_WARN_ONCE("h2o_prefill: ", c10::Join("; ", sentences));
  }
}

PrefillConfig PrefillConfig::of_layer(int64_t layer) const {
  PrefillConfig config = *this;
  if (layer == 0) config.error_rows = 0;
  return config;
}

int64_t PrefillConfig::memory_size() const {
  return sink_tokens + (widens() ? max_widen : 1) * (local_window + heavy_budget);
}

PrefillConfig PrefillConfig::resolved(int64_t shortest, int64_t prompt_tokens) const {
  PrefillConfig config = *this;
  if (is_auto()) config.min_prefill = prompt_tokens >= shortest ? chunk_size : shortest;
  return config;
}

bool PrefillConfig::matches(const PrefillConfig& other) const {
  PrefillConfig mine = *this, its = other;
  if (is_auto() || other.is_auto()) mine.min_prefill = its.min_prefill;
  return mine == its;
}

bool PrefillConfig::is_dense_layer(int64_t layer) const {
  return std::ranges::find(dense_layers, layer) != dense_layers.end();
}

bool PrefillConfig::is_long_call(int64_t past, int64_t num_tokens) const {
  const bool decodes = num_tokens == 1 && past > 0;
  return num_tokens >= sparse_from() && !decodes;
}

bool PrefillConfig::is_sparse_call(int64_t past, int64_t num_tokens) const {
  return !exact && is_long_call(past, num_tokens) && memory_size() > 0;
}

bool PrefillConfig::is_sparse(int64_t layer, int64_t past, int64_t num_tokens) const {
  return is_sparse_call(past, num_tokens) && !is_dense_layer(layer);
}

int64_t PrefillConfig::last_chunk_begin(int64_t past, int64_t num_tokens) const {
  check_call_tokens(past, num_tokens);
  return num_tokens == 0 ? past : past + (num_tokens - 1) / chunk_size * chunk_size;
}

}  // namespace h2o_prefill
