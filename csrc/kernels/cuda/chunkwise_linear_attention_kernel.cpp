// Linear attention on CUDA. Kernels compute the causal direction of bfloat16 and float16; float32,
// two directions and gradients are composite.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/linear_attention_request.h"
#include "common/tensors.h"
#include "kernels/composite/linear_attention.h"
#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/linear_attention.h"

namespace h2o_prefill {
namespace {

const float* floats_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<float>() : nullptr;
}

bool has_kernel(const at::Tensor& k, const at::Tensor& v) {
  return k.scalar_type() != at::kDouble &&
         has_linear_attention(heads_view(k).dtype, k.size(3), v.size(3));
}

LinearAttentionResult attend(const LinearAttentionRequest& r) {
  const c10::cuda::CUDAGuard guard(r.query.device());
  if (!r.causal || !has_kernel(r.key, r.value)) {
    return composite::linear_attention(r, &composite::linear_scan);
  }
  auto out = empty_heads(r.query.size(0), r.query.size(1), r.length(), r.value.size(3), r.query);
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto q = with_aligned_rows(r.query);
  const auto k = with_aligned_rows(r.key);
  const auto v = with_aligned_rows(r.value);
  const auto state = contiguous(r.state), normalizer = contiguous(r.normalizer);
  const auto options = k.options().dtype(at::kFloat);
  auto last_state = at::empty({k.size(0), k.size(1), k.size(3), v.size(3)}, options);
  auto last_normalizer = at::empty({k.size(0), k.size(1), r.normalize ? k.size(3) : 0}, options);
  if (k.size(0) == 0 || k.size(2) == 0) {
    // Without tokens the states stay as they are.
    state.defined() ? last_state.copy_(state) : last_state.zero_();
    normalizer.defined() ? last_normalizer.copy_(normalizer) : last_normalizer.zero_();
    return {out, last_state, last_normalizer};
  }
  LinearAttentionParams params{};
  params.query = heads_view(q);
  params.key = heads_view(k);
  params.value = heads_view(v);
  params.out = heads_view(out);
  const at::Tensor decay = r.decay_by_token();
  if (decay.defined()) {
    params.log_decay = decay.const_data_ptr<float>();
    params.decay_stride_batch = decay.stride(0);
    params.decay_stride_head = decay.stride(1);
    params.decay_stride_row = decay.stride(2);
  }
  params.state = floats_or_null(state);
  params.normalizer = floats_or_null(normalizer);
  params.last_state = last_state.mutable_data_ptr<float>();
  params.last_normalizer = r.normalize ? last_normalizer.mutable_data_ptr<float>() : nullptr;
  params.feature_map = r.feature_map;
  params.normalize = r.normalize;
  params.scale = static_cast<float>(r.scale);
  const auto workspace = at::empty({linear_attention_workspace_floats(params)}, options);
  params.workspace = workspace.mutable_data_ptr<float>();
  C10_CUDA_CHECK(launch_linear_attention(params, c10::cuda::getCurrentCUDAStream()));
  return {out, last_state, last_normalizer};
}

LinearAttentionInputGradients attend_backward(const LinearAttentionRequest& r,
                                              const LinearAttentionGradients& gradients) {
  const c10::cuda::CUDAGuard guard(r.query.device());
  return composite::linear_attention_backward(r, gradients, &composite::linear_scan);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&attend_backward>);
}

}  // namespace
}  // namespace h2o_prefill
