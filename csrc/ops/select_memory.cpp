#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor select_memory(const at::Tensor& scores, const at::Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens) {
  static const auto op = find_op<decltype(select_memory)>("h2o_prefill::select_memory");
  return op.call(scores, memory, chunk_begin, chunk_end, local_window, heavy_budget, sink_tokens);
}

H2O_SCHEMA(
    "select_memory(Tensor scores, Tensor memory, int chunk_begin, int chunk_end, int "
    "local_window, "
    "int heavy_budget, int sink_tokens) -> Tensor")

}  // namespace h2o_prefill
