#include "h2o_prefill/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "common/rules.h"

namespace h2o_prefill {
namespace {

at::Tensor without(const at::Tensor& scores, const at::Tensor& removed) {
  return scores.masked_fill(removed, -std::numeric_limits<float>::infinity());
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options)
    : options_(options), generator_(at::detail::createCPUGenerator(options.seed)) {
  TORCH_CHECK_VALUE(options.temperature >= 0, "temperature must be >= 0, got ",
                    options.temperature);
  check_at_least("top_k", options.top_k, 0);
  TORCH_CHECK_VALUE(options.top_p > 0 && options.top_p <= 1, "top_p must be in (0, 1], got ",
                    options.top_p);
  TORCH_CHECK_VALUE(options.min_p >= 0 && options.min_p <= 1, "min_p must be in [0, 1], got ",
                    options.min_p);
  TORCH_CHECK_VALUE(options.penalty > 0, "penalty must be > 0, got ", options.penalty);
}

// In the order of transformers' logits processors.
int64_t Sampler::next(const at::Tensor& token_ids, const at::Tensor& logits) {
  at::Tensor scores = logits.to(at::kFloat);
  const auto highest = scores.max().item<double>();
  TORCH_CHECK_VALUE(std::isfinite(highest), "logits must have a finite maximum, got ", highest);
  if (options_.penalty != 1.0) {
    const auto of_text = scores.gather(1, token_ids);
    scores = scores.scatter(
        1, token_ids,
        at::where(of_text < 0, of_text * options_.penalty, of_text / options_.penalty));
  }
  if (options_.temperature == 0.0) return scores.argmax(-1).item<int64_t>();
  scores = scores / options_.temperature;
  if (options_.top_k > 0) {
    const auto best = std::get<0>(scores.topk(std::min(options_.top_k, scores.size(1))));
    scores = without(scores, scores < best.slice(1, -1));
  }
  if (options_.top_p < 1.0) {
    const auto [ascending, order] = scores.sort(/*dim=*/-1, /*descending=*/false);
    auto removed = ascending.softmax(-1).cumsum(-1) <= 1 - options_.top_p;
    removed.slice(1, -1).fill_(false);
    scores = without(scores, removed.scatter(1, order, removed));
  }
  if (options_.min_p > 0.0) {
    const auto likely = scores.softmax(-1);
    scores = without(scores, likely < options_.min_p * likely.amax(-1, /*keepdim=*/true));
  }
  return at::multinomial(scores.softmax(-1), 1, /*replacement=*/false, generator_).item<int64_t>();
}

}  // namespace h2o_prefill
