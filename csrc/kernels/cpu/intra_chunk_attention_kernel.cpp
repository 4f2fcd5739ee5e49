#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attention_call.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention_cpu(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    int64_t chunk_size, std::optional<double> scale) {
  check_intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size, scale);
  if (q_argument.scalar_type() == at::kDouble) {
    return composite::intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size, scale);
  }
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const int64_t length = q.size(2);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto colsum = at::empty({k.size(0), k.size(1), length}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  const AttendChunkArgs call = attention_call(q, k, v, out, lse.mutable_data_ptr<float>(),
                                              scale_or_default(scale, q.size(3)));
  const int64_t largest = std::min(chunk_size, length);
  Workspace workspace;
  AttendChunk attend(call.query, call.key, call.value, call.recall,
                     {.rows = largest, .keys = {largest, 0}}, workspace);
  workspace.allocate();
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    attend.run(
        chunk_pass(call, {.begin = begin, .count = std::min(chunk_size, length - begin), .past = 0},
                   {.data = colsum.mutable_data_ptr<float>() + begin, .stride = length}));
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_cpu);
}

}  // namespace
}  // namespace h2o_prefill
