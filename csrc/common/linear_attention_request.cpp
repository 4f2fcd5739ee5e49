#include "common/linear_attention_request.h"

#include <ATen/ATen.h>

#include <array>

#include "common/checks.h"
#include "common/rules.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

// A tensor of the accumulation type and device of the query, with these sizes.
void check_accumulated(const char* name, const at::Tensor& t, const at::Tensor& query,
                       at::IntArrayRef sizes) {
  check_dims(name, t, static_cast<int64_t>(sizes.size()));
  check_dtype(name, t, accumulate_type(query));
  check_device(name, t, query, "q");
  TORCH_CHECK_VALUE(t.sizes() == sizes, name, " must have shape ", sizes, ", got ", t.sizes());
}

void check_log_decay(const LinearAttentionRequest& r) {
  const at::Tensor& decay = r.log_decay;
  if (!decay.defined()) return;
  const int64_t batch = r.key.size(0), heads = r.key.size(1);
  TORCH_CHECK_VALUE(decay.layout() == at::kStrided && (decay.dim() == 1 || decay.dim() == 3),
                    "log_decay must be a strided tensor [", heads, "] or [", batch, ", ", heads,
                    ", ", r.length(), "], got ", describe(decay));
  if (decay.dim() == 1) {
    check_accumulated("log_decay", decay, r.query, {heads});
  } else {
    check_accumulated("log_decay", decay, r.query, {batch, heads, r.length()});
  }
  if (!decay.is_cpu() || decay.numel() == 0) return;
  const double highest = decay.max().item<double>();  // NaN if any is
  TORCH_CHECK_VALUE(highest <= 0, "log_decay must be <= 0, got ", highest);
}

void check_states(const LinearAttentionRequest& r) {
  const int64_t batch = r.key.size(0), heads = r.key.size(1);
  const int64_t dim = r.key.size(3), value_dim = r.value.size(3);
  if (r.state.defined()) {
    TORCH_CHECK_VALUE(r.causal, "initial_state must be none where causal is False");
    check_accumulated("initial_state", r.state, r.query, {batch, heads, dim, value_dim});
  }
  if (r.normalizer.defined()) {
    TORCH_CHECK_VALUE(r.normalize, "initial_normalizer must be none where normalize is False");
    check_accumulated("initial_normalizer", r.normalizer, r.query, {batch, heads, dim});
  }
  TORCH_CHECK_VALUE(!r.normalize || r.state.defined() == r.normalizer.defined(),
                    "initial_state and initial_normalizer must come together where normalize is "
                    "True, got only ",
                    r.state.defined() ? "initial_state" : "initial_normalizer");
}

}  // namespace

FeatureMap feature_map_named(std::string_view name) {
  if (name == "elu+1") return FeatureMap::kEluPlusOne;
  if (name == "relu") return FeatureMap::kRelu;
  TORCH_CHECK_VALUE(name == "identity",
                    "feature_map must be \"elu+1\", \"relu\" or \"identity\", got \"",
                    one_line(name), "\"");
  return FeatureMap::kIdentity;
}

at::Tensor LinearAttentionRequest::decay_by_token() const {
  if (!log_decay.defined() || log_decay.dim() == 3) return log_decay;
  return log_decay.view({1, -1, 1}).expand({key.size(0), key.size(1), length()});
}

void LinearAttentionRequest::check() const {
  check_qkv({query, key, value, scale});
  check_size("k", key, 2, query.size(2), "the length of q");
  check_at_least("chunk_size", chunk_size, 1);
  check_log_decay(*this);
  check_states(*this);
}

void LinearAttentionRequest::check(const LinearAttentionGradients& gradients) const {
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), length(), value.size(3)};
  check_dims("grad_out", gradients.out, 4);
  check_same_kind("grad_out", gradients.out, query, "q");
  TORCH_CHECK_VALUE(gradients.out.sizes() == at::IntArrayRef(sizes), "grad_out must have shape ",
                    at::IntArrayRef(sizes), ", got ", gradients.out.sizes());
  const int64_t batch = key.size(0), heads = key.size(1), dim = key.size(3);
  if (gradients.state.defined()) {
    check_accumulated("grad_state", gradients.state, query, {batch, heads, dim, value.size(3)});
  }
  if (gradients.normalizer.defined()) {
    check_accumulated("grad_normalizer", gradients.normalizer, query,
                      {batch, heads, normalize ? dim : 0});
  }
}

LinearAttentionRequest checked_linear_attention_request(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& log_decay,
    const OptionalTensor& initial_state, const OptionalTensor& initial_normalizer,
    std::string_view feature_map, int64_t chunk_size, bool causal, bool normalize,
    std::optional<double> scale) {
  LinearAttentionRequest request{q,
                                 k,
                                 v,
                                 or_undefined(log_decay),
                                 or_undefined(initial_state),
                                 or_undefined(initial_normalizer),
                                 feature_map_named(feature_map),
                                 chunk_size,
                                 causal,
                                 normalize,
                                 scale.value_or(1.0)};
  request.check();
  return request;
}

}  // namespace h2o_prefill
