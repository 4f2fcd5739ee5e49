#include "kernels/cuda/entry.h"

#include <ATen/ops/empty.h>

#include "common/tensors.h"
#include "kernels/cuda/attend_forward_sm90.h"
#include "kernels/cuda/column_sums_sm90.h"
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

}  // namespace

bool has_attention_kernel(const at::Tensor& q, const at::Tensor& v) {
  return q.scalar_type() != at::kDouble && has_kernel(q.size(3)) && has_kernel(v.size(3));
}

at::Tensor with_aligned_rows(const at::Tensor& t) {
  return t.numel() == 0 || has_aligned_rows(t) ? t : t.clone(at::MemoryFormat::Contiguous);
}

AttendForwardParams forward_params(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& out, const at::Tensor& lse, double scale) {
  AttendForwardParams params{};
  params.query = heads_view(q);
  params.key = heads_view(k);
  params.value = heads_view(v);
  params.out = heads_view(out);
  params.lse = lse.defined() ? lse.mutable_data_ptr<float>() : nullptr;
  params.scale_log2 = static_cast<float>(scale * static_cast<double>(kLog2E));
  params.rows = q.size(2);
  params.past = k.size(2) - q.size(2);
  return params;
}

ColumnSumsParams column_sums_params(const AttendForwardParams& forward, float* sums,
                                    int64_t sums_stride) {
  ColumnSumsParams params{};
  params.query = forward.query;
  params.key = forward.key;
  params.lse = forward.lse;
  params.scale_log2 = forward.scale_log2;
  params.row_begin = forward.row_begin;
  params.rows = forward.rows;
  params.past = forward.past;
  params.chunk_size = forward.chunk_size;
  params.gathered = forward.gathered;
  params.indices = forward.indices;
  params.width = forward.width;
  params.sums = sums;
  params.sums_stride = sums_stride;
  return params;
}

void run(const AttendForwardParams& params) {
  const bool hopper = use_attend_forward_sm90() && has_attend_forward_sm90(params);
  const auto launch = hopper ? launch_attend_forward_sm90 : launch_attend_forward;
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
}

void run(ColumnSumsParams params, at::Tensor& workspace, const at::Tensor& like) {
  // What a pass gets depends on its own shape alone, as its order of additions does.
  if (const int64_t floats = column_sums_partial_floats(params); floats > 0) {
    if (!workspace.defined() || workspace.numel() < floats) {
      workspace = at::empty({floats}, like.options().dtype(at::kFloat));
    }
    params.partial = workspace.mutable_data_ptr<float>();
  }
  const bool hopper = use_column_sums_sm90() && has_column_sums_sm90(params);
  const auto launch = hopper ? launch_column_sums_sm90 : launch_column_sums;
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace h2o_prefill
