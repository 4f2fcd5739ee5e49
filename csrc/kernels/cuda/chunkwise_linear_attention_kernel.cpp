// Linear attention on CUDA. Kernels compute the causal forward direction; the other direction and
// the gradients are the composite ones over a float32 recurrence that the kernels compute.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <utility>

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

// Kernel parameters of one direction of a call, without its outputs.
struct LinearCall {
  at::Tensor query, key, value, log_decay, state, normalizer;
  FeatureMap feature_map = FeatureMap::kIdentity;
  bool normalize = false;
  double scale = 1.0;
  bool reverse = false;
};

bool has_kernel(const at::Tensor& k, const at::Tensor& v) {
  return k.scalar_type() != at::kDouble &&
         has_linear_attention(heads_view(k).dtype, k.size(3), v.size(3));
}

// Writes `out`; returns the states after the last token, [B, Hkv, D, Dv] and [B, Hkv, D or 0].
std::pair<at::Tensor, at::Tensor> launch_kernels(const LinearCall& call, const at::Tensor& out) {
  const auto rows = [](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat ? with_contiguous_rows(t) : with_aligned_rows(t);
  };
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto q = rows(call.query), k = rows(call.key), v = rows(call.value);
  const auto state = contiguous(call.state), normalizer = contiguous(call.normalizer);
  const auto options = k.options().dtype(at::kFloat);
  auto last_state = at::empty({k.size(0), k.size(1), k.size(3), v.size(3)}, options);
  auto last_normalizer = at::empty({k.size(0), k.size(1), call.normalize ? k.size(3) : 0}, options);
  if (k.size(0) == 0 || k.size(2) == 0) {
    // Without tokens the states stay as they are.
    state.defined() ? last_state.copy_(state) : last_state.zero_();
    normalizer.defined() ? last_normalizer.copy_(normalizer) : last_normalizer.zero_();
    return {last_state, last_normalizer};
  }
  LinearAttentionParams params{};
  params.query = heads_view(q);
  params.key = heads_view(k);
  params.value = heads_view(v);
  params.out = heads_view(out);
  if (const at::Tensor& decay = call.log_decay; decay.defined()) {
    params.log_decay = decay.const_data_ptr<float>();
    params.decay_stride_batch = decay.stride(0);
    params.decay_stride_head = decay.stride(1);
    params.decay_stride_row = decay.stride(2);
  }
  params.state = floats_or_null(state);
  params.normalizer = floats_or_null(normalizer);
  params.last_state = last_state.mutable_data_ptr<float>();
  params.last_normalizer = call.normalize ? last_normalizer.mutable_data_ptr<float>() : nullptr;
  params.feature_map = call.feature_map;
  params.normalize = call.normalize;
  params.scale = static_cast<float>(call.scale);
  if (call.reverse) params = params.reversed();
  const auto workspace = at::empty({linear_attention_workspace_floats(params)}, options);
  params.workspace = workspace.mutable_data_ptr<float>();
  C10_CUDA_CHECK(launch_linear_attention(params, c10::cuda::getCurrentCUDAStream()));
  return {last_state, last_normalizer};
}

composite::Scanned scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& log_decay, const at::Tensor& state, int64_t chunk_size,
                        bool reverse) {
  if (!has_kernel(k, v)) {
    return composite::linear_scan(q, k, v, log_decay, state, chunk_size, reverse);
  }
  auto out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const auto states = launch_kernels({.query = q,
                                      .key = k,
                                      .value = v,
                                      .log_decay = log_decay,
                                      .state = state,
                                      .normalizer = {},
                                      .reverse = reverse},
                                     out);
  return {out, states.first};
}

LinearAttentionResult attend(const LinearAttentionRequest& r) {
  const c10::cuda::CUDAGuard guard(r.query.device());
  if (!r.causal || !has_kernel(r.key, r.value)) return composite::linear_attention(r, &scan);
  auto out = empty_heads(r.query.size(0), r.query.size(1), r.length(), r.value.size(3), r.query);
  const auto [state, normalizer] = launch_kernels({.query = r.query,
                                                   .key = r.key,
                                                   .value = r.value,
                                                   .log_decay = r.decay_by_token(),
                                                   .state = r.state,
                                                   .normalizer = r.normalizer,
                                                   .feature_map = r.feature_map,
                                                   .normalize = r.normalize,
                                                   .scale = r.scale},
                                                  out);
  return {out, state, normalizer};
}

LinearAttentionInputGradients attend_backward(const LinearAttentionRequest& r,
                                              const LinearAttentionGradients& gradients) {
  const c10::cuda::CUDAGuard guard(r.query.device());
  return composite::linear_attention_backward(r, gradients, &scan);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&attend_backward>);
}

}  // namespace
}  // namespace h2o_prefill
