#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"

namespace h2o_prefill {
namespace {

AttentionResult memory_attention_cuda(const AttentionArguments& arguments,
                                      const at::Tensor& indices_argument) {
  if (!has_attention_kernel(arguments))
    return composite::memory_attention(arguments, indices_argument);
  const c10::cuda::CUDAGuard guard(arguments.query.device());
  const AttentionArguments x = arguments.with_rows(&with_aligned_rows);
  const auto indices = indices_argument.contiguous();
  const int64_t width = indices.size(2);
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::empty({x.key.size(0), x.key.size(1), width}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum.zero_()};

  const auto call = attention_call(x, out, lse);
  AttentionStream stream(out);
  const AttendForwardParams pass = memory_pass(
      call, call.rows, {.positions = indices.const_data_ptr<int32_t>(), .width = width});
  stream.attend(pass);
  if (width > 0) {
    stream.sum_columns(column_sums_pass(pass, call.lse, colsum.mutable_data_ptr<float>(), width));
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("memory_attention", &memory_attention_entry<&memory_attention_cuda>);
}

}  // namespace
}  // namespace h2o_prefill
