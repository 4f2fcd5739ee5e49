#include <torch/library.h>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"

namespace h2o_prefill::composite {
namespace {

// A position is on the CPU whatever the device of the keys is.
void advance_position_(at::Tensor& position, int64_t num_tokens, std::string_view settings) {
  const auto [past, last_chunk_begin] = Position::read(position);
  check_call_tokens(past, num_tokens);
  check_no_internal_overlap({"position", position});
  const auto config = read_settings(settings);
  int64_t* const values = position.mutable_data_ptr<int64_t>();
  values[0] = past + num_tokens;
  if (config->is_sparse_call(past, num_tokens)) {
    values[position.stride(0)] = config->last_chunk_begin(past, num_tokens);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("advance_position_", &advance_position_);
}

}  // namespace h2o_prefill::composite
