#include "ops/dispatch.h"

namespace h2o_prefill {

void accumulate_scores_(at::Tensor& scores, const at::Tensor& memory, const at::Tensor& colsum) {
  static const auto op = find_op<decltype(accumulate_scores_)>("h2o_prefill::accumulate_scores_");
  op.call(scores, memory, colsum);
}

H2O_SCHEMA("accumulate_scores_(Tensor(a!) scores, Tensor memory, Tensor colsum) -> ()")

}  // namespace h2o_prefill
