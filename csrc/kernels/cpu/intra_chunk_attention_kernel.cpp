#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"

namespace h2o_prefill {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention_cpu(
    const at::Tensor& q_argument, const at::Tensor& k_argument, const at::Tensor& v_argument,
    int64_t chunk_size, std::optional<double> scale) {
  if (q_argument.scalar_type() == at::kDouble) {
    return composite::intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size, scale);
  }
  check_intra_chunk_attention(q_argument, k_argument, v_argument, chunk_size);
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const int64_t length = q.size(2);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  auto lse = at::empty({q.size(0), q.size(1), length}, q.options().dtype(at::kFloat));
  auto colsum = at::empty({k.size(0), k.size(1), length}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  AttendChunkArgs args{};
  args.query = heads_view(q);
  args.key = heads_view(k);
  args.value = heads_view(v);
  args.out = heads_view(out);
  args.lse = lse.mutable_data_ptr<float>();
  args.scale = static_cast<float>(scale_or_default(scale, q.size(3)));
  args.num_sets = 1;
  const int64_t largest = std::min(chunk_size, length);
  AttendChunk attend(args.query, args.key, args.value, {}, largest, largest, 0);
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    args.begin = begin;
    args.rows = std::min(chunk_size, length - begin);
    args.sets[0] = {
        begin, args.rows, nullptr, nullptr, true, colsum.mutable_data_ptr<float>() + begin, length};
    attend.run(args);
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_cpu);
}

}  // namespace
}  // namespace h2o_prefill
