#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/composite/composite.h"
#include "kernels/cuda/attention_passes.h"

namespace h2o_prefill {
namespace {

AttentionResult intra_chunk_attention_cuda(const AttentionArguments& arguments,
                                           int64_t chunk_size) {
  if (!has_attention_kernel(arguments))
    return composite::intra_chunk_attention(arguments, chunk_size);
  const c10::cuda::CUDAGuard guard(arguments.query.device());
  const AttentionArguments x = arguments.with_rows(&with_aligned_rows);
  const int64_t length = x.length();
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::empty({x.key.size(0), x.key.size(1), length}, lse.options());
  if (out.numel() == 0) return {out, lse, colsum};

  const auto call = attention_call(x, out, lse);
  AttentionStream stream(out);
  const AttendForwardParams pass = chunk_pass(call, chunk_size);
  stream.attend(pass);
  stream.sum_columns(column_sums_pass(pass, call.lse, colsum.mutable_data_ptr<float>(), length));
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CUDA, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_entry<&intra_chunk_attention_cuda>);
}

}  // namespace
}  // namespace h2o_prefill
