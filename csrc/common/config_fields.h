// The fields of PrefillConfig as a table: their names, and the range of each number.
#pragma once

#include <limits>
#include <tuple>

#include "h2o_prefill/config.h"

namespace h2o_prefill {

// Positions and counts of them are int32 in every list.
inline constexpr int64_t kLargestSetting = std::numeric_limits<int32_t>::max();
// Each of L, H and K: memory sets have room for all of them, whatever the length of a prompt.
inline constexpr int64_t kLargestBudget = int64_t{1} << 22;
// Layers of a model, and positions whose scores a MemorySetTracker keeps.
inline constexpr int64_t kMostLayers = int64_t{1} << 16;
inline constexpr int64_t kMostScores = int64_t{1} << 24;
// Rows of a chunk whose error is measured, and the factor of a memory set by errors.
inline constexpr int64_t kMostErrorRows = 256;
inline constexpr int64_t kMostWidening = 64;
// Limits of lexical recall: matches for a token, characters that are looked up.
inline constexpr int64_t kMostMatches = 1024;
inline constexpr int64_t kMostCharacters = 64;
// Lexical recall: tokens of the longest n-gram that is looked up, keys recalled for each match, and
// how often a token may have occurred to be looked up alone.
inline constexpr int64_t kRecallSuffix = 2;
inline constexpr int64_t kRecallSpan = 4;
inline constexpr int64_t kRecallMaxCount = 32;

template <typename T>
struct ConfigField {
  const char* name;
  T PrefillConfig::* member;
  // Range of a number, or of each number of a list.
  int64_t least = 0;
  int64_t most = kLargestSetting;
};

inline constexpr auto kConfigFields = std::make_tuple(
    ConfigField{"chunk_size", &PrefillConfig::chunk_size, 1},
    ConfigField{"local_window", &PrefillConfig::local_window, 0, kLargestBudget},
    ConfigField{"heavy_budget", &PrefillConfig::heavy_budget, 0, kLargestBudget},
    ConfigField{"sink_tokens", &PrefillConfig::sink_tokens, 0, kLargestBudget},
    ConfigField{"dense_tail", &PrefillConfig::dense_tail},
    ConfigField{"dense_layers", &PrefillConfig::dense_layers},
    ConfigField{"wide", &PrefillConfig::wide},
    ConfigField{"gqa_reduce", &PrefillConfig::gqa_reduce},
    ConfigField{"min_prefill", &PrefillConfig::min_prefill, 1},
    ConfigField{"recall", &PrefillConfig::recall, 0, kMostMatches},
    ConfigField{"recall_characters", &PrefillConfig::recall_characters, 0, kMostCharacters},
    ConfigField{"error_rows", &PrefillConfig::error_rows, 0, kMostErrorRows},
    ConfigField{"error_threshold", &PrefillConfig::error_threshold},
    ConfigField{"max_widen", &PrefillConfig::max_widen, 1, kMostWidening},
    ConfigField{"exact", &PrefillConfig::exact});

// Calls visit(field) for each, in order.
template <typename Visit>
void for_each_field(const Visit& visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, kConfigFields);
}

}  // namespace h2o_prefill
