#include "common/linear_attention_request.h"
#include "ops/dispatch.h"

namespace h2o_prefill {

std::tuple<at::Tensor, LinearState> chunkwise_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
    const LinearState& initial, const LinearAttentionOptions& options) {
  static const auto op =
      find_op<LinearAttentionSignature>("h2o_prefill::chunkwise_linear_attention");
  const auto [out, state, normalizer] = op.call(
      q, k, v, if_defined(log_decay), if_defined(initial.state), if_defined(initial.normalizer),
      options.feature_map, options.chunk_size, options.causal, options.normalize, options.scale);
  return {out, {state, normalizer}};
}

H2O_SCHEMA(
    "chunkwise_linear_attention(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? "
    "initial_state=None, Tensor? initial_normalizer=None, str feature_map=\"elu+1\", int "
    "chunk_size=64, bool causal=True, bool normalize=False, float? "
    "scale=None) -> (Tensor out, Tensor state, Tensor normalizer)")
H2O_SCHEMA(
    "chunkwise_linear_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? log_decay, "
    "Tensor? "
    "initial_state, Tensor? initial_normalizer, Tensor grad_out, Tensor? grad_state, Tensor? "
    "grad_normalizer, str feature_map, int chunk_size, bool causal, bool "
    "normalize, float? scale=None) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor "
    "grad_log_decay, Tensor grad_initial_state, Tensor grad_initial_normalizer)")

}  // namespace h2o_prefill
