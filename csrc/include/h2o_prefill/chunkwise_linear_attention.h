// Linear attention of one sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "h2o_prefill/export.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Holds the options and the state of one sequence, for inference. A decoder has one of these in
// each layer. Calls may have any number of tokens: one is a decoding step.
class H2O_API ChunkwiseLinearAttention : public torch::CustomClassHolder {
 public:
  // Throws if the options are invalid or not causal: only causal attention continues from a state.
  explicit ChunkwiseLinearAttention(LinearAttentionOptions options = {});

  // Continues the sequence. q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], log_decay as
  // chunkwise_linear_attention takes it. Returns [B, Hq, T, Dv]. A call that throws leaves the
  // state as it was.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& log_decay = {});

  // Number of tokens so far.
  int64_t length() const { return length_; }

  // Undefined tensors before the first call. Later calls do not change the tensors returned.
  const LinearState& state() const { return state_; }

  // Begins a new sequence.
  void reset();

  const LinearAttentionOptions& options() const { return options_; }

  // Saves and loads the sequence as plain tensors: int64 [1], the number of tokens so far, and the
  // state if there is one.
  std::vector<at::Tensor> state_tensors() const;
  void load_state_tensors(const std::vector<at::Tensor>& tensors);

 private:
  LinearAttentionOptions options_;
  LinearState state_;
  int64_t length_ = 0;
};

}  // namespace h2o_prefill
