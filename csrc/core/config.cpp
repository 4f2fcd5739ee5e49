#include "h2o_prefill/config.h"

#include <algorithm>

#include "core/arguments.h"

namespace h2o_prefill {

void PrefillConfig::validate() const {
  check_at_least("chunk_size", chunk_size, 1);
  check_at_least("local_window", local_window, 0);
  check_at_least("heavy_budget", heavy_budget, 0);
  check_at_least("sink_tokens", sink_tokens, 0);
  check_at_least("dense_tail", dense_tail, 0);
  check_at_least("recall_block", recall_block, 1);
  if (min_prefill) check_at_least("min_prefill", *min_prefill, 1);
  for (const int64_t layer : dense_layers) check_at_least("dense_layers", layer, 0);
  TORCH_CHECK_VALUE(gqa_reduce == "sum" || gqa_reduce == "max",
                    "gqa_reduce must be \"sum\" or \"max\", got \"", gqa_reduce, "\"");
  if (memory_size() >= chunk_size) {
    TORCH_WARN_ONCE("the memory set (", memory_size(),
                    " positions) is not smaller than chunk_size (", chunk_size,
                    "): sparse prefill saves less than it could");
  }
}

bool PrefillConfig::is_dense_layer(int64_t layer) const {
  return std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
}

}  // namespace h2o_prefill
