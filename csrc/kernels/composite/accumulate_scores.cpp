#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

void accumulate_scores_(at::Tensor& scores, const at::Tensor& memory, const at::Tensor& colsum) {
  check_accumulate_scores(scores, memory, colsum);
  // An absent entry adds nothing; position 0 stands in for it. Without positions nothing is listed.
  if (scores.size(2) == 0 || memory.size(2) == 0) return;
  scores.scatter_add_(2, memory.clamp_min(0).to(at::kLong),
                      colsum.to(scores.scalar_type()).masked_fill(memory < 0, 0));
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("accumulate_scores_", &accumulate_scores_);
}

}  // namespace h2o_prefill::composite
