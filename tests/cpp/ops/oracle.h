// Selection of a memory set in plain loops: the oracle of select_memory and of
// chunked_sparse_attention.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "testing.h"

namespace h2o_prefill::testing {

struct Budgets {
  int64_t local_window = 0;
  int64_t heavy_budget = 0;
  int64_t sink_tokens = 0;

  int64_t size() const { return local_window + heavy_budget + sink_tokens; }
};

// One head's set after the chunk [chunk_begin, chunk_end), from scores by position (0 behind their
// end), ascending.
inline std::vector<int32_t> select_one_head(const std::vector<double>& scores,
                                            const std::vector<int32_t>& memory, int64_t chunk_begin,
                                            int64_t chunk_end, const Budgets& budgets) {
  std::set<int32_t> candidates;
  for (const int32_t p : memory) {
    if (p >= 0) candidates.insert(p);
  }
  for (int64_t p = chunk_begin; p < chunk_end; ++p) candidates.insert(static_cast<int32_t>(p));
  std::set<int32_t> chosen;
  for (int64_t p = std::max<int64_t>(chunk_end - budgets.local_window, 0); p < chunk_end; ++p) {
    chosen.insert(static_cast<int32_t>(p));
  }
  for (int64_t p = 0; p < std::min(budgets.sink_tokens, chunk_end); ++p)
    chosen.insert(static_cast<int32_t>(p));
  std::vector<std::pair<double, int32_t>> ranked;  // by falling score, then by rising position
  for (const int32_t p : candidates) {
    if (!chosen.count(p))
      ranked.emplace_back(p < static_cast<int64_t>(scores.size()) ? -scores[p] : 0.0, p);
  }
  std::sort(ranked.begin(), ranked.end());
  ranked.resize(std::min<size_t>(ranked.size(), budgets.heavy_budget));
  for (const auto& [score, p] : ranked) chosen.insert(p);
  return {chosen.begin(), chosen.end()};
}

// The same for every head: scores [B, Hkv, Ts], memory [B, Hkv, any] -> [B, Hkv, K + L + H].
inline at::Tensor select(const at::Tensor& scores, const at::Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, const Budgets& budgets) {
  std::vector<int32_t> all;
  for (int64_t b = 0; b < memory.size(0); ++b) {
    for (int64_t h = 0; h < memory.size(1); ++h) {
      const auto row = scores[b][h].to(at::kDouble).contiguous();
      const double* first = row.const_data_ptr<double>();
      auto chosen = select_one_head({first, first + row.numel()}, to_vector(memory[b][h]),
                                    chunk_begin, chunk_end, budgets);
      chosen.resize(budgets.size(), -1);
      all.insert(all.end(), chosen.begin(), chosen.end());
    }
  }
  return at::tensor(all, at::kInt).view({memory.size(0), memory.size(1), budgets.size()});
}

}  // namespace h2o_prefill::testing
