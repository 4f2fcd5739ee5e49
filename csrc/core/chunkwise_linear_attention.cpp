#include "h2o_prefill/chunkwise_linear_attention.h"

#include <ATen/ops/tensor.h>

#include <utility>

#include "common/linear_attention_request.h"
#include "common/rules.h"

namespace h2o_prefill {
namespace {

constexpr size_t kStateTensors = 3;

}  // namespace

ChunkwiseLinearAttention::ChunkwiseLinearAttention(LinearAttentionOptions options)
    : options_(std::move(options)) {
  feature_map_named(options_.feature_map);
  check_at_least("chunk_size", options_.chunk_size, 1);
  TORCH_CHECK_VALUE(options_.causal,
                    "causal must be true: attention in both directions cannot continue from a "
                    "state; call chunkwise_linear_attention()");
}

at::Tensor ChunkwiseLinearAttention::forward(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const at::Tensor& log_decay) {
  check_inference_only("q", q);
  check_inference_only("k", k);
  check_inference_only("v", v);
  LinearState before = state_;
  if (!options_.normalize) before.normalizer.reset();
  auto [out, state] = chunkwise_linear_attention(q, k, v, log_decay, before, options_);
  check_call_tokens(length_, q.size(2));
  state_ = std::move(state);
  length_ += q.size(2);
  return out;
}

void ChunkwiseLinearAttention::reset() {
  state_ = {};
  length_ = 0;
}

std::vector<at::Tensor> ChunkwiseLinearAttention::state_tensors() const {
  std::vector<at::Tensor> tensors{at::tensor({length_}, at::kLong)};
  if (state_.state.defined()) {
    tensors.push_back(state_.state.clone());
    tensors.push_back(state_.normalizer.clone());
  }
  return tensors;
}

void ChunkwiseLinearAttention::load_state_tensors(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1 || tensors.size() == kStateTensors,
                    "tensors must be a state of ChunkwiseLinearAttention, 1 or ", kStateTensors,
                    " tensors, got ", tensors.size());
  check_dims("tensors[0]", tensors[0], 1);
  check_dtype("tensors[0]", tensors[0], at::kLong);
  check_size("tensors[0]", tensors[0], 0, 1, "one number, the tokens so far");
  const auto length = tensors[0].item<int64_t>();
  check_at_least("tensors[0]", length, 0);
  check_call_tokens(length, 0);
  LinearState state;
  if (tensors.size() == kStateTensors) {
    check_inference_only("tensors[1]", tensors[1]);
    check_inference_only("tensors[2]", tensors[2]);
    check_dims("tensors[1]", tensors[1], 4);
    check_float("tensors[1]", tensors[1]);
    check_dims("tensors[2]", tensors[2], 3);
    check_same_kind("tensors[2]", tensors[2], tensors[1], "tensors[1]");
    state = {.state = tensors[1].clone(), .normalizer = tensors[2].clone()};
  }
  state_ = std::move(state);
  length_ = length;
}

}  // namespace h2o_prefill
