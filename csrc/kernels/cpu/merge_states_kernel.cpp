#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "common/checks.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill {
namespace {

template <typename T>
void merge_rows(const at::Tensor& out_a, const float* lse_a, const at::Tensor& out_b,
                const float* lse_b, at::Tensor& out, float* lse) {
  const int64_t heads = out.size(1);
  const int64_t length = out.size(2);
  const int64_t dim = out.size(3);
  const auto row = [&](const at::Tensor& t, int64_t i) {
    const int64_t offset = i / (heads * length) * t.stride(0) + i / length % heads * t.stride(1) +
                           i % length * t.stride(2);
    return static_cast<T*>(t.data_ptr()) + offset;
  };
  at::parallel_for(0, out.size(0) * heads * length, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const MergeWeights weight = merge_weights(lse_a[i], lse_b[i]);
      const T* a = row(out_a, i);
      const T* b = row(out_b, i);
      T* to = row(out, i);
      // An empty side's output may be anything, a NaN included: it is left out, not multiplied by
      // 0.
      for (int64_t d = 0; d < dim; ++d) {
        const float from_a = weight.a == 0.0F ? 0.0F : static_cast<float>(a[d]) * weight.a;
        const float from_b = weight.b == 0.0F ? 0.0F : static_cast<float>(b[d]) * weight.b;
        to[d] = static_cast<T>(from_a + from_b);
      }
      lse[i] = weight.lse;
    }
  });
}

std::tuple<at::Tensor, at::Tensor> merge_states_cpu(const at::Tensor& out_a,
                                                    const at::Tensor& lse_a,
                                                    const at::Tensor& out_b,
                                                    const at::Tensor& lse_b) {
  check_merge_states(out_a, lse_a, out_b, lse_b);
  if (out_a.scalar_type() == at::kDouble) {
    return composite::merge_states(out_a, lse_a, out_b, lse_b);
  }
  auto out = empty_heads(out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3), out_a);
  auto lse = at::empty(lse_a.sizes(), lse_a.options());
  const auto dense_a = lse_a.contiguous();
  const auto dense_b = lse_b.contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "merge_states", [&] {
    merge_rows<scalar_t>(with_contiguous_rows(out_a), dense_a.const_data_ptr<float>(),
                         with_contiguous_rows(out_b), dense_b.const_data_ptr<float>(), out,
                         lse.mutable_data_ptr<float>());
  });
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("merge_states", &merge_states_cpu); }

}  // namespace h2o_prefill
