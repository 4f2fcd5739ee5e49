#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/dense_attention.h"
#include "kernels/cpu/merge_states.h"

namespace h2o_prefill {
namespace {

// Rows of a step and keys of a set: the logits of a row block over so many keys stay in L2.
constexpr int64_t kStep = 1024;

// Whether packing the keys pays against PyTorch's attention, which packs nothing for few rows but
// copies grouped KV heads, and which has no fast path for float16 or a single row of bfloat16.
bool packing_pays(const at::Tensor& q, const at::Tensor& k) {
  const int64_t group = q.size(1) / k.size(1);
  const int64_t rows = q.size(2) * group;  // that share packed keys
  if (q.scalar_type() == at::kHalf) return true;
  if (q.scalar_type() == at::kBFloat16) return q.size(2) == 1 || rows >= 16;
  return rows >= (group > 1 ? 16 : 64);
}

// Rows [begin, begin + rows) of the history, the queries q, into out (in its dtype). Two key sets
// at a time; partial results are merged in float32.
void attend_step(AttendChunk& attend, AttendChunkArgs args, const at::Tensor& q, int64_t begin,
                 at::Tensor out) {
  const int64_t rows = q.size(2);
  const auto part_like = at::empty({0}, q.options().dtype(at::kFloat));
  const bool one_run = begin <= kStep;
  at::Tensor total;
  at::Tensor total_lse;
  args.query = heads_view(q);
  args.rows = rows;
  args.sets[0] = {begin, rows, nullptr, nullptr, true};
  args.num_sets = 1;
  // From the nearest keys to the first ones.
  for (int64_t left = begin;;) {
    for (; left > 0 && args.num_sets < 2; ++args.num_sets) {
      const int64_t count = std::min(left, kStep);
      left -= count;
      args.sets[args.num_sets] = {left, count};
    }
    auto part = one_run ? out : empty_heads(q.size(0), q.size(1), rows, out.size(3), part_like);
    auto part_lse = at::empty({q.size(0), q.size(1), rows}, part_like.options());
    args.out = heads_view(part);
    args.lse = part_lse.mutable_data_ptr<float>();
    attend.run(args);
    if (one_run) return;
    if (total.defined()) {
      std::tie(total, total_lse) = merge_states_cpu(total, total_lse, part, part_lse);
    } else {
      total = part;
      total_lse = part_lse;
    }
    if (left == 0) break;
    args.num_sets = 0;
  }
  out.copy_(total);
}

}  // namespace

at::Tensor dense_attention_cpu(const at::Tensor& q_argument, const at::Tensor& k_argument,
                               const at::Tensor& v_argument, std::optional<double> scale) {
  if (q_argument.scalar_type() == at::kDouble || q_argument.numel() == 0 ||
      !packing_pays(q_argument, k_argument)) {
    return composite::dense_attention(q_argument, k_argument, v_argument, scale);
  }
  check_dense_attention(q_argument, k_argument, v_argument);
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const int64_t length = q.size(2);
  const int64_t past = k.size(2) - length;
  AttendChunkArgs args{};
  args.key = heads_view(k);
  args.value = heads_view(v);
  args.scale = static_cast<float>(scale_or_default(scale, q.size(3)));
  const int64_t step = std::min(length, kStep);
  const int64_t keys = std::min(k.size(2), kStep);
  AttendChunk attend(heads_view(q), args.key, args.value, {}, step, keys, keys);
  auto out = empty_heads(q.size(0), q.size(1), length, v.size(3), q);
  for (int64_t row = 0; row < length; row += step) {
    const int64_t rows = std::min(step, length - row);
    attend_step(attend, args, q.narrow(2, row, rows), past + row, out.narrow(2, row, rows));
  }
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("dense_attention", &dense_attention_cpu); }

}  // namespace h2o_prefill
