// Settings of one sparse prefill. The Python class of the same name has these fields, and those of
// lexical_recall.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

struct H2O_API PrefillConfig {
  int64_t chunk_size = 1024;   // S, tokens of a chunk
  int64_t local_window = 256;  // L, last positions before a chunk, always in its memory set
  int64_t heavy_budget = 256;  // H, positions kept for their score
  int64_t sink_tokens = 0;     // K, first positions of the prompt, always kept
  int64_t dense_tail = 0;      // last queries of a call that attend to every key
  std::vector<int64_t> dense_layers = {};  // layers that stay dense
  std::string gqa_reduce = "sum";          // "sum" or "max" over the query heads of a KV head
  std::optional<int64_t> min_prefill =
      {};                      // calls with fewer new tokens are dense; default: one chunk
  int64_t recall_block = 128;  // rows that share one list of recalled keys

  // Throws c10::ValueError that names the field, the rule and the value. Warns, once a process, of
  // a memory set that is not smaller than a chunk: legal, but beyond where the method pays.
  void validate() const;

  // Positions that a memory set holds at most: K + L + H.
  int64_t memory_size() const { return sink_tokens + local_window + heavy_budget; }

  // New tokens from which on a call is sparse.
  int64_t sparse_from() const { return min_prefill.value_or(chunk_size); }

  bool is_dense_layer(int64_t layer) const;
};

}  // namespace h2o_prefill
