#include "ops/dispatch.h"

namespace h2o_prefill {

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                            const at::Tensor& scales, int64_t outputs) {
  static const auto op = find_op<decltype(packed_embedding)>("h2o_prefill::packed_embedding");
  return op.call(ids, packed, scales, outputs);
}

H2O_SCHEMA("packed_embedding(Tensor ids, Tensor packed, Tensor scales, int outputs) -> Tensor")

}  // namespace h2o_prefill
