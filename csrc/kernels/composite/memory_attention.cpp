#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/composite/attend.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

AttentionResult memory_attention(const AttentionArguments& x, const at::Tensor& indices) {
  const int64_t width = indices.size(2);
  // No more positions than keys: the rest of each list is absent.
  const auto members = indices.narrow(2, 0, std::min(width, x.total()));
  const auto present = (members >= 0).unsqueeze(2).unsqueeze(2);
  const auto attended = attend(x.query, composite::gather_rows(x.key, members),
                               composite::gather_rows(x.value, members), present, x.scale());
  auto out = x.empty_out();
  out.copy_(attended.out);
  const int64_t absent = width - members.size(2);
  return {out, attended.lse.contiguous(),
          at::constant_pad_nd(attended.colsum, {0, absent}).contiguous()};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("memory_attention", &memory_attention_entry<&memory_attention>);
}

}  // namespace h2o_prefill::composite
