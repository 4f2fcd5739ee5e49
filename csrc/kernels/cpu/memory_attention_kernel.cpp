#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attention_call.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention_cpu(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    const at::Tensor& indices_argument, std::optional<double> scale) {
  check_memory_attention(q_argument, k_argument, v_argument, indices_argument, scale);
  if (q_argument.scalar_type() == at::kDouble) {
    return composite::memory_attention(q_argument, k_argument, v_argument, indices_argument, scale);
  }
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t length = q.size(2);
  const int64_t width = indices.size(2);
  const int64_t units = k.size(0) * k.size(1);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto colsum = at::zeros({k.size(0), k.size(1), width}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  MemorySetView sets{.positions = indices.const_data_ptr<int32_t>(), .width = width};
  std::vector<int64_t> counts(units);
  count_members(sets, units, counts.data());
  sets.counts = counts.data();
  const AttendChunkArgs call = attention_call(q, k, v, out, lse.mutable_data_ptr<float>(),
                                              scale_or_default(scale, q.size(3)));
  Workspace workspace;
  AttendChunk attend(call.query, call.key, call.value, call.recall,
                     {.rows = length, .keys = {*std::max_element(counts.begin(), counts.end()), 0}},
                     workspace);
  workspace.allocate();
  attend.run(memory_pass(call, {.begin = 0, .count = length, .past = k.size(2) - length}, sets,
                         {.data = colsum.mutable_data_ptr<float>(), .stride = width}));
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("memory_attention", &memory_attention_cpu); }

}  // namespace
}  // namespace h2o_prefill
