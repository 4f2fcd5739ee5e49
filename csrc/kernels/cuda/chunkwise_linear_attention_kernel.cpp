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

bool has_kernel(const at::Tensor& k, const at::Tensor& v) {
  return k.scalar_type() != at::kDouble &&
         has_linear_attention(heads_view(k).dtype, k.size(3), v.size(3));
}

LinearAttentionResult attend(const LinearAttentionRequest& r) {
  const c10::cuda::CUDAGuard guard(r.query.device());
  if (!r.causal || !has_kernel(r.key, r.value)) {
    return composite::linear_attention(r, &composite::linear_scan);
  }
  return attend_causally(r, &with_aligned_rows, [&](LinearAttentionParams params) {
    const auto workspace =
        at::empty({linear_attention_workspace_floats(params)}, r.key.options().dtype(at::kFloat));
    params.workspace = workspace.mutable_data_ptr<float>();
    C10_CUDA_CHECK(launch_linear_attention(params, c10::cuda::getCurrentCUDAStream()));
  });
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend>);
}

}  // namespace
}  // namespace h2o_prefill
