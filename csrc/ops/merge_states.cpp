#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b) {
  static const auto op = find_op<decltype(merge_states)>("h2o_prefill::merge_states");
  return op.call(out_a, lse_a, out_b, lse_b);
}

H2O_SCHEMA(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor "
    "lse)")

}  // namespace h2o_prefill
