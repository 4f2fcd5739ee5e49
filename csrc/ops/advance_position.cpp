#include "ops/dispatch.h"

namespace h2o_prefill {

void advance_position_(at::Tensor& position, int64_t num_tokens, std::string_view settings) {
  static const auto op =
      find_op<void(at::Tensor&, int64_t, std::string_view)>("h2o_prefill::advance_position_");
  op.call(position, num_tokens, settings);
}

H2O_SCHEMA("advance_position_(Tensor(a!) position, SymInt num_tokens, str settings) -> ()")

}  // namespace h2o_prefill
