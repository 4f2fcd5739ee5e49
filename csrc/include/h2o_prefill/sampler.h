// The next token from logits, as `generate` of Hugging Face transformers chooses it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

struct SamplerOptions {
  // 0: the token with the highest logit, and nothing below but the penalty counts.
  double temperature = 0.0;
  int64_t top_k = 0;     // of the K likeliest; 0: of all
  double top_p = 1.0;    // of the likeliest whose probabilities add up to this
  double min_p = 0.0;    // of tokens at least this times as likely as the likeliest
  double penalty = 1.0;  // of tokens that the text has: logits above 0 are divided by it
  uint64_t seed = 0;
};

class H2O_API Sampler {
 public:
  // Throws c10::ValueError if an option is out of range.
  explicit Sampler(const SamplerOptions& options = {});

  // There are no copies, which would share a generator: another Sampler with the same options draws
  // the same tokens.
  Sampler& operator=(Sampler&&) = delete;

  // The next token after token_ids, int64 [1, T], from logits [1, vocabulary]. Draws as
  // torch.multinomial does, with a generator of its own. Throws c10::ValueError if the largest
  // logit is NaN or infinite.
  int64_t next(const at::Tensor& token_ids, const at::Tensor& logits);

 private:
  SamplerOptions options_;
  at::Generator generator_;
};

}  // namespace h2o_prefill
