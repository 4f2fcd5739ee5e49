// Settings of sparse prefill. Fields, defaults, rules, presets and the text form are defined here
// and in common/config.cpp alone: the Python class of the same name reads them from there.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// A default-constructed config is the algorithm as specified, with no option on: the preset "h2o",
// but sparse in every call of a chunk or more.
struct H2O_API PrefillConfig {
  // A min_prefill by the costs of the device: see resolved() and crossover.h.
  static constexpr int64_t kAuto = -1;

  int64_t chunk_size = 1024;   // S, tokens of a chunk; inside a chunk attention is exact
  int64_t local_window = 256;  // L, last positions before a chunk, always in its memory set
  int64_t heavy_budget = 256;  // H, positions kept for their score (heavy hitters)
  int64_t sink_tokens = 0;     // K, first positions of the prompt, always kept
  int64_t dense_tail = 0;      // last queries of a call that attend to every key
  std::vector<int64_t> dense_layers = {};  // layers that stay dense
  // Factors of L and H: {layer, factor} for the heads of a layer, {layer, KV head, factor} for one
  // of them instead.
  std::vector<std::vector<int64_t>> wide = {};
  std::string gqa_reduce = "sum";  // "sum" or "max" over the query heads of a KV head
  // Calls with fewer new tokens are dense; none: chunk_size. "auto" in a text, kAuto here: dense
  // where a prompt is too short for sparse attention to be faster.
  std::optional<int64_t> min_prefill = {};
  int64_t recall = 0;             // earlier matches recalled for a token (n-gram lookup)
  int64_t recall_characters = 0;  // characters that recall looks up besides; 0: tokens alone
  int64_t error_rows = 0;         // rows of a chunk whose error is measured; 0: no widening
  double error_threshold = 0.01;  // relative squared error above which a head's L and H double
  int64_t max_widen = 4;          // the most that L and H grow by during a prompt
  bool exact = false;             // every call is dense, whatever the other settings

  // The settings of a preset: "exact", dense attention; "recommended", with recall and with memory
  // sets that grow where errors are large; or "h2o". Throws c10::ValueError for other names.
  static PrefillConfig preset(std::string_view name);
  static const std::vector<std::string>& preset_names();

  // The settings of a text: a preset, then fields separated by commas, each at most once, layers
  // joined by "+": "recommended,local_window=256,wide=7x4+18.2x2". A text of fields alone changes
  // "h2o". Throws c10::ValueError for another form, an unknown name, or values that check()
  // refuses.
  static PrefillConfig parse(std::string_view text);

  // A copy with the fields of a text like "local_window=256,wide=7x4" changed.
  PrefillConfig with(std::string_view fields) const;

  // The shortest text that parse() turns into these settings, and a text of all fields, which does
  // not depend on the presets of a version.
  std::string to_string() const;
  std::string to_fields() const;

  // Throws c10::ValueError that names the field, the rule and the value.
  void check() const;

  // A sentence for each setting that is valid but unlikely to be wanted.
  std::vector<std::string> advice() const;

  // Calls check(), and warns with advice() once per process.
  void validate() const;

  // The settings of one layer, with its L and H, and the factors of its heads alone. Errors
  // are not measured in layer 0, whose small outputs inflate them.
  PrefillConfig of_layer(int64_t layer) const;

  // The factor of a KV head's L and H in a layer; in all of them, the largest. Settings of_layer()
  // need no layer.
  int64_t factor_of_head(int64_t head, std::optional<int64_t> layer = std::nullopt) const;

  // The largest factor of L and H.
  int64_t widest() const;

  // Positions that a memory set of settings of_layer() holds at most: K + L + H, of the widest head
  // when it has grown as far as it may.
  int64_t memory_size() const;

  // Rows that share a list of recalled keys: 64 where that divides chunk_size, else their greatest
  // common divisor.
  int64_t recall_block() const { return std::gcd(chunk_size, int64_t{64}); }

  // Whether memory sets grow where errors are large.
  bool widens() const { return error_rows > 0 && max_widen > 1; }

  // Whether min_prefill is open.
  bool is_auto() const { return min_prefill == kAuto; }

  // These settings for a prompt of so many tokens on a device where sparse attention is faster from
  // `shortest` tokens on: min_prefill is chunk_size for longer prompts, and `shortest` for others.
  // A min_prefill that is not open stays.
  PrefillConfig resolved(int64_t shortest, int64_t prompt_tokens) const;

  // Whether two settings are the same but for what an open min_prefill was resolved to.
  bool matches(const PrefillConfig& other) const;

  // Minimum number of new tokens for a sparse call; of a min_prefill that is still open,
  // chunk_size.
  int64_t sparse_from() const { return is_auto() ? chunk_size : min_prefill.value_or(chunk_size); }

  bool is_dense_layer(int64_t layer) const;

  // For a call with num_tokens new tokens after `past` earlier ones: whether it is long enough to
  // be sparse and not decoding, whether it is sparse in the layers that are not dense, and whether
  // it is sparse in one layer. With `exact`, and without a memory set, every call is dense.
  bool is_long_call(int64_t past, int64_t num_tokens) const;
  bool is_sparse_call(int64_t past, int64_t num_tokens) const;
  bool is_sparse(int64_t layer, int64_t past, int64_t num_tokens) const;

  // Where the last chunk of a call begins; `past` for a call without tokens.
  int64_t last_chunk_begin(int64_t past, int64_t num_tokens) const;

  bool operator==(const PrefillConfig&) const = default;
};

}  // namespace h2o_prefill
