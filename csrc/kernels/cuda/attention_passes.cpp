#include "kernels/cuda/attention_passes.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "common/tensors.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill {
namespace {

constexpr int64_t kAlignment = 16;  // bytes
constexpr int64_t kLargestHeadDim = 256;

bool has_aligned_rows(const at::Tensor& t) {
  if (t.size(-1) > 1 && t.stride(-1) != 1) return false;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment) return false;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) {
    if (t.size(d) > 1 && t.stride(d) * t.element_size() % kAlignment) return false;
  }
  return true;
}

bool has_kernel(int64_t head_dim) { return head_dim % 8 == 0 && head_dim <= kLargestHeadDim; }

AttendForwardParams pass_of(const AttentionCall& call, const RowRange& rows) {
  AttendForwardParams params{};
  params.query = call.query;
  params.key = call.key;
  params.value = call.value;
  params.out = call.out;
  params.lse = call.lse;
  params.scale_log2 = call.scale_log2;
  params.rows = rows;
  return params;
}

ColumnSumsParams sums_of(const AttendForwardParams& pass, const float* lse, float* sums,
                         int64_t stride) {
  ColumnSumsParams params{};
  params.query = pass.query;
  params.key = pass.key;
  params.lse = lse;
  params.scale_log2 = pass.scale_log2;
  params.rows = pass.rows;
  params.gathered = pass.gathered;
  params.causal = pass.causal;
  params.memory = pass.memory;
  params.sums = sums;
  params.sums_stride = stride;
  return params;
}

}  // namespace

bool has_attention_kernel(const at::Tensor& q, const at::Tensor& v) {
  return q.scalar_type() != at::kDouble && has_kernel(q.size(3)) && has_kernel(v.size(3));
}

at::Tensor with_aligned_rows(const at::Tensor& t) {
  return t.numel() == 0 || has_aligned_rows(t) ? t : t.clone(at::MemoryFormat::Contiguous);
}

AttentionCall::AttentionCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& out, const at::Tensor& lse, double scale)
    : query(heads_view(q)),
      key(heads_view(k)),
      value(heads_view(v)),
      out(heads_view(out)),
      lse(lse.defined() ? lse.mutable_data_ptr<float>() : nullptr),
      scale_log2(static_cast<float>(scale * static_cast<double>(kLog2E))) {}

AttendForwardParams chunk_pass(const AttentionCall& call, const RowRange& rows,
                               int64_t chunk_size) {
  AttendForwardParams params = pass_of(call, rows);
  params.causal = {.begin = rows.position(),
                   .count = rows.count,
                   .chunk_size = std::min(chunk_size, rows.count)};
  return params;
}

AttendForwardParams memory_pass(const AttentionCall& call, const RowRange& rows,
                                const MemorySetView& sets) {
  AttendForwardParams params = pass_of(call, rows);
  params.gathered = true;
  params.memory = sets;
  return params;
}

AttendForwardParams merged_memory_pass(const AttentionCall& call, const RowRange& rows,
                                       const MemorySetView& sets, const RecallView& recall,
                                       float* memory_lse) {
  AttendForwardParams params = memory_pass(call, rows, sets);
  params.recall = recall;
  params.memory_lse = memory_lse;
  params.merge_with_out = true;
  return params;
}

AttendForwardParams dense_pass(const AttentionCall& call, const RowRange& rows, int64_t window) {
  AttendForwardParams params = pass_of(call, rows);
  params.causal = {.begin = 0, .count = rows.position() + rows.count, .window = window};
  return params;
}

AttendForwardParams limited_pass(const AttentionCall& call, const int32_t* limits) {
  AttendForwardParams params = pass_of(call, {.begin = 0, .count = call.query.length, .past = 0});
  params.limits = limits;
  return params;
}

ColumnSumsParams chunk_sums(const AttendForwardParams& pass, float* sums, int64_t stride) {
  return sums_of(pass, pass.lse, sums, stride);
}

ColumnSumsParams memory_sums(const AttendForwardParams& pass, const float* lse, float* sums,
                             int64_t stride) {
  return sums_of(pass, lse, sums, stride);
}

ColumnSumsParams added_memory_sums(const AttendForwardParams& pass, const float* lse, float* scores,
                                   int64_t stride) {
  ColumnSumsParams params = sums_of(pass, lse, scores, stride);
  params.scatter_add = true;
  return params;
}

AttentionStream::AttentionStream(const at::Tensor& like)
    : kernels_(cuda_kernels()),
      stream_(c10::cuda::getCurrentCUDAStream()),
      float_options_(like.options().dtype(at::kFloat)) {}

void AttentionStream::attend(const AttendForwardParams& pass) const {
  C10_CUDA_CHECK(kernels_.attend_forward(pass, stream_));
}

void AttentionStream::sum_columns(ColumnSumsParams pass) {
  // The workspace depends on the shape of the pass alone, and so does the order of its additions.
  if (const int64_t floats = kernels_.column_sums_partial_floats(pass); floats > 0) {
    if (!workspace_.defined() || workspace_.numel() < floats) {
      workspace_ = at::empty({floats}, float_options_);
    }
    pass.partial = workspace_.mutable_data_ptr<float>();
  }
  C10_CUDA_CHECK(kernels_.column_sums(pass, stream_));
}

}  // namespace h2o_prefill
