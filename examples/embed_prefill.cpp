// Embeds the library in a C++ program: a small decoder with random weights prefills a prompt in two
// sparse calls, with lexical recall, and then decodes.
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

constexpr int64_t kVocabulary = 1000, kHidden = 256, kLayers = 2;
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 64;

at::Tensor weight(int64_t in, int64_t out) {
  return at::randn({in, out}) / std::sqrt(static_cast<double>(in));
}

// [B, T, H * head_dim] as [B, H, T, head_dim].
at::Tensor split_heads(const at::Tensor& x) {
  return x.unflatten(2, {-1, kHeadDim}).transpose(1, 2);
}

at::Tensor rms_norm(const at::Tensor& x) {
  return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-6);
}

// The weights of a layer, without an MLP.
struct Layer {
  at::Tensor query = weight(kHidden, kHeads* kHeadDim);
  at::Tensor key = weight(kHidden, kKvHeads* kHeadDim);
  at::Tensor value = weight(kHidden, kKvHeads* kHeadDim);
  at::Tensor out = weight(kHeads * kHeadDim, kHidden);
};

// Positions are a part of the embedding. Rotary embeddings turn queries and keys before attend(),
// so that a cached key keeps its position (see llama_model.cpp).
struct Decoder {
  at::Tensor embedding = at::randn({kVocabulary, kHidden});
  std::vector<Layer> layers = std::vector<Layer>(kLayers);

  // The most likely token after token_ids [1, T], which follow those that the context holds.
  at::Tensor forward(const at::Tensor& token_ids, h2o_prefill::PrefillContext& context) const {
    const int64_t past = context.length();
    const auto positions = at::arange(past, past + token_ids.size(1), at::kFloat).unsqueeze(1);
    auto hidden = embedding.index({token_ids}) + positions.sin();
    context.begin(token_ids);
    for (int64_t i = 0; i < kLayers; ++i) {
      const Layer& layer = layers[i];
      const auto x = rms_norm(hidden);
      const auto attended =
          context.attend(i, split_heads(x.matmul(layer.query)), split_heads(x.matmul(layer.key)),
                         split_heads(x.matmul(layer.value)));
      hidden = hidden + attended.transpose(1, 2).flatten(2).matmul(layer.out);
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
