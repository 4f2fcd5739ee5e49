#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

AttentionResult intra_chunk_attention(const AttentionArguments& x, int64_t chunk_size) {
  const int64_t length = x.length();
  auto out = x.empty_out();
  auto lse = x.empty_lse();
  auto colsum = at::empty({x.key.size(0), x.key.size(1), length}, lse.options());
  for (int64_t begin = 0; begin < length; begin += chunk_size) {
    const int64_t rows = std::min(chunk_size, length - begin);
    const auto chunk = [&](const at::Tensor& t) { return t.narrow(2, begin, rows); };
    const auto attended =
        attend(chunk(x.query), chunk(x.key), chunk(x.value), causal_mask(rows, out), x.scale());
    chunk(out).copy_(attended.out);
    chunk(lse).copy_(attended.lse);
    chunk(colsum).copy_(attended.colsum);
  }
  return {out, lse, colsum};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("intra_chunk_attention", &intra_chunk_attention_entry<&intra_chunk_attention>);
}

}  // namespace h2o_prefill::composite
