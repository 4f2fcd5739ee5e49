#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/memory_count.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention_cpu(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    const at::Tensor& indices_argument, std::optional<double> scale) {
  if (q_argument.scalar_type() == at::kDouble) {
    return composite::memory_attention(q_argument, k_argument, v_argument, indices_argument, scale);
  }
  check_memory_attention(q_argument, k_argument, v_argument, indices_argument);
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const auto indices = indices_argument.contiguous();
  const int64_t length = q.size(2);
  const int64_t width = indices.size(2);
  const auto counts = memory_counts(indices, k.size(2), "indices");
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto colsum = at::zeros({k.size(0), k.size(1), width}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  AttendChunkArgs args{};
  args.query = heads_view(q);
  args.key = heads_view(k);
  args.value = heads_view(v);
  args.out = heads_view(out);
  args.lse = lse.mutable_data_ptr<float>();
  args.rows = length;
  args.scale = static_cast<float>(scale_or_default(scale, q.size(3)));
  args.num_sets = 1;
  args.sets[0] = {0,
                  width,
                  indices.const_data_ptr<int32_t>(),
                  counts.data(),
                  false,
                  colsum.mutable_data_ptr<float>(),
                  width};
  const int64_t longest = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  AttendChunk(args.query, args.key, args.value, {}, length, longest, 0).run(args);
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("memory_attention", &memory_attention_cpu); }

}  // namespace
}  // namespace h2o_prefill
