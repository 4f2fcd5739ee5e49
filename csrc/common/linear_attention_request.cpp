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
                    "feature_map must be \"elu+1\", \"relu\" or \"identity\", got \"", name, "\"");
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
  TORCH_CHECK_VALUE(!(causal && diagonal_once), "diagonal_once must be False where causal is True");
  check_log_decay(*this);
  check_states(*this);
}

LinearAttentionResult attend_causally(
    const LinearAttentionRequest& r,
    const std::function<void(const LinearAttentionParams&)>& kernel) {
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto data = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<float>() : nullptr;
  };
  const auto q = with_contiguous_rows(r.query), k = with_contiguous_rows(r.key);
  const auto v = with_contiguous_rows(r.value);
  const auto decay = r.decay_by_token();
  const auto state = contiguous(r.state), normalizer = contiguous(r.normalizer);
  const auto options = k.options().dtype(at::kFloat);
  auto out = empty_heads(q.size(0), q.size(1), r.length(), v.size(3), q);
  auto last_state = at::empty({k.size(0), k.size(1), k.size(3), v.size(3)}, options);
  auto last_normalizer = at::empty({k.size(0), k.size(1), r.normalize ? k.size(3) : 0}, options);
  if (k.size(0) == 0 || k.size(2) == 0) {
    // Without tokens the states stay as they are.
    state.defined() ? last_state.copy_(state) : last_state.zero_();
    normalizer.defined() ? last_normalizer.copy_(normalizer) : last_normalizer.zero_();
    return {out, last_state, last_normalizer};
  }
  kernel({.query = heads_view(q),
          .key = heads_view(k),
          .value = heads_view(v),
          .out = heads_view(out),
          .log_decay = data(decay),
          .decay_stride_batch = decay.defined() ? decay.stride(0) : 0,
          .decay_stride_head = decay.defined() ? decay.stride(1) : 0,
          .decay_stride_row = decay.defined() ? decay.stride(2) : 0,
          .state = data(state),
          .normalizer = data(normalizer),
          .last_state = last_state.mutable_data_ptr<float>(),
          .last_normalizer = r.normalize ? last_normalizer.mutable_data_ptr<float>() : nullptr,
          .feature_map = r.feature_map,
          .normalize = r.normalize,
          .scale = static_cast<float>(r.scale)});
  return {out, last_state, last_normalizer};
}

void check_linear_attention_gradients(const LinearAttentionRequest& r,
                                      const LinearAttentionGradients& gradients) {
  const std::array<int64_t, 4> sizes{r.query.size(0), r.query.size(1), r.length(), r.value.size(3)};
  check_dims("grad_out", gradients.out, 4);
  check_same_kind("grad_out", gradients.out, r.query, "q");
  TORCH_CHECK_VALUE(gradients.out.sizes() == at::IntArrayRef(sizes), "grad_out must have shape ",
                    at::IntArrayRef(sizes), ", got ", gradients.out.sizes());
  const int64_t batch = r.key.size(0), heads = r.key.size(1), dim = r.key.size(3);
  if (gradients.state.defined()) {
    check_accumulated("grad_state", gradients.state, r.query, {batch, heads, dim, r.value.size(3)});
  }
  if (gradients.normalizer.defined()) {
    check_accumulated("grad_normalizer", gradients.normalizer, r.query,
                      {batch, heads, r.normalize ? dim : 0});
  }
}

LinearAttentionRequest checked_linear_attention_request(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& log_decay, const std::optional<at::Tensor>& initial_state,
    const std::optional<at::Tensor>& initial_normalizer, std::string_view feature_map,
    int64_t chunk_size, bool causal, bool diagonal_once, bool normalize,
    std::optional<double> scale) {
  LinearAttentionRequest request{q,
                                 k,
                                 v,
                                 log_decay.value_or(at::Tensor()),
                                 initial_state.value_or(at::Tensor()),
                                 initial_normalizer.value_or(at::Tensor()),
                                 feature_map_named(feature_map),
                                 chunk_size,
                                 causal,
                                 diagonal_once,
                                 normalize,
                                 scale.value_or(1.0)};
  request.check();
  return request;
}

}  // namespace h2o_prefill
