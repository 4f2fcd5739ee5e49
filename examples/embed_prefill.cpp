// Embeds the library in a C++ program: a small decoder with random weights takes a prompt in two
// calls, sparsely, with what the tokens recall, and then decodes.
//
//   embed_prefill [prompt tokens, default 6000]
#include <ATen/ATen.h>
#include <h2o_prefill/library.h>
#include <h2o_prefill/prefill_context.h>

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "errors.h"

namespace {

constexpr int64_t kVocabulary = 1000;
constexpr int64_t kHidden = 256;
constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 64;
constexpr int64_t kLayers = 2;

at::Tensor weight(int64_t in, int64_t out) {
  return at::randn({in, out}) / std::sqrt(static_cast<double>(in));
}

at::Tensor split_heads(const at::Tensor& x) {
  return x.view({x.size(0), x.size(1), -1, kHeadDim}).transpose(1, 2);
}

at::Tensor rms_norm(const at::Tensor& x) {
  return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-6);
}

// Rotary position embedding of x [B, H, T, D] at positions [past, past + T). Keys are cached with
// it, so that a key keeps its position wherever it is used later.
at::Tensor apply_rope(const at::Tensor& x, int64_t past) {
  const int64_t half = x.size(3) / 2;
  const auto frequencies =
      at::pow(10000.0, -at::arange(half, x.options()) / static_cast<double>(half));
  const auto angles = at::outer(at::arange(past, past + x.size(2), x.options()), frequencies);
  const auto cos = at::cat({angles.cos(), angles.cos()}, 1);
  const auto sin = at::cat({angles.sin(), angles.sin()}, 1);
  const auto rotated = at::cat({-x.narrow(3, half, half), x.narrow(3, 0, half)}, 3);
  return x * cos + rotated * sin;
}

// The weights of a layer, without an MLP.
struct Layer {
  at::Tensor query = weight(kHidden, kHeads* kHeadDim);
  at::Tensor key = weight(kHidden, kKvHeads* kHeadDim);
  at::Tensor value = weight(kHidden, kKvHeads* kHeadDim);
  at::Tensor out = weight(kHeads * kHeadDim, kHidden);
};

struct Decoder {
  at::Tensor embedding = at::randn({kVocabulary, kHidden});
  std::vector<Layer> layers = std::vector<Layer>(kLayers);

  // The most likely token after token_ids [1, T], which follow those that the context holds.
  at::Tensor forward(const at::Tensor& token_ids, h2o_prefill::PrefillContext& context) const {
    const int64_t past = context.length();
    auto hidden = embedding.index({token_ids});
    context.begin(token_ids);
    for (int64_t i = 0; i < kLayers; ++i) {
      const auto x = rms_norm(hidden);
      const auto attended =
          context.attend(i, apply_rope(split_heads(x.matmul(layers[i].query)), past),
                         apply_rope(split_heads(x.matmul(layers[i].key)), past),
                         split_heads(x.matmul(layers[i].value)));
      hidden = hidden + attended.transpose(1, 2).flatten(2).matmul(layers[i].out);
    }
    return rms_norm(hidden.select(1, -1)).matmul(embedding.t()).argmax(-1, /*keepdim=*/true);
  }
};

void run(int64_t prompt_tokens) {
  if (prompt_tokens < 2048) examples::fail("the prompt must have at least 2048 tokens");
  const Decoder decoder;
  h2o_prefill::PrefillContext context(kLayers, /*max_tokens=*/prompt_tokens + 8);

  // A call that ends with a whole chunk continues as if both calls had been one.
  const auto prompt = at::randint(kVocabulary, {1, prompt_tokens}, at::kLong);
  const int64_t chunk = context.config().chunk_size;
  const int64_t first = prompt_tokens / 2 / chunk * chunk;
  decoder.forward(prompt.narrow(1, 0, first), context);
  auto token = decoder.forward(prompt.narrow(1, first, prompt_tokens - first), context);
  for (int64_t i = 0; i < 8; ++i) token = decoder.forward(token, context);

  const auto memory = context.tracker()->indices(/*layer=*/0)[0][0];
  const auto scores = context.tracker()->scores(/*layer=*/0)[0][0];
  std::cout << context.config().to_string() << ": " << context.length() << " tokens\n"
            << "KV head 0 of layer 0 remembers " << memory.ge(0).sum().item<int64_t>()
            << " positions; most attended: position " << scores.argmax().item<int64_t>()
            << ", score " << scores.max().item<double>() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  return examples::report_errors([&] {
    std::cout << "h2o_prefill " << h2o_prefill::version()
              << ", CPU kernels: " << h2o_prefill::cpu_isa() << '\n';
    run(argc > 1 ? std::stoll(argv[1]) : 6000);
    return 0;
  });
}
