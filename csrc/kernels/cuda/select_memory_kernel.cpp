#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cuda/chunk_end.h"

namespace h2o_prefill {
namespace {

at::Tensor select_memory_cuda(const at::Tensor& scores_argument, const at::Tensor& memory_argument,
                              int64_t chunk_begin, int64_t chunk_end, int64_t local_window,
                              int64_t heavy_budget, int64_t sink_tokens) {
  check_select_memory(scores_argument, memory_argument, chunk_begin, chunk_end, local_window,
                      heavy_budget, sink_tokens);
  if (scores_argument.scalar_type() != at::kFloat) {
    return composite::select_memory(scores_argument, memory_argument, chunk_begin, chunk_end,
                                    local_window, heavy_budget, sink_tokens);
  }
  const c10::cuda::CUDAGuard guard(scores_argument.device());
  const auto scores = scores_argument.contiguous();
  const auto memory = memory_argument.contiguous();
  const MemoryBudget budget{local_window, heavy_budget, sink_tokens};
  auto selected = at::empty({memory.size(0), memory.size(1), budget.width()}, memory.options());
  const SelectMemoryParams params{
      .from = {.positions = memory.const_data_ptr<int32_t>(), .width = memory.size(2)},
      .scores = scores.const_data_ptr<float>(),
      .scores_stride = scores.size(2),
      .scores_length = scores.size(2),
      .chunk_begin = chunk_begin,
      .chunk_end = chunk_end,
      .budget = budget,
      .selected = selected.mutable_data_ptr<int32_t>(),
      .width = budget.width()};
  C10_CUDA_CHECK(launch_chunk_end({.units = memory.size(0) * memory.size(1), .select = params},
                                  c10::cuda::getCurrentCUDAStream()));
  return selected;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) { m.impl("select_memory", &select_memory_cuda); }

}  // namespace
}  // namespace h2o_prefill
