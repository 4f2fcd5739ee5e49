// Embeds the library in a C++ program: one decoder layer with random weights takes a prompt in two
// calls, sparsely, and then decodes a token over everything it has seen.
//
//   embed_prefill [prompt tokens, default 6000]
#include <ATen/ATen.h>
#include <h2o_prefill/chunked_sparse_attention.h>
#include <h2o_prefill/library.h>

#include <cmath>
#include <exception>
#include <iostream>
#include <string>

namespace {

constexpr int64_t kHidden = 256;
constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 64;

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

// A decoder layer without its MLP: norm, attention, residual.
class DecoderLayer {
 public:
  explicit DecoderLayer(const h2o_prefill::PrefillConfig& config)
      : attention_(config),
        query_(weight(kHidden, kHeads * kHeadDim)),
        key_(weight(kHidden, kKvHeads * kHeadDim)),
        value_(weight(kHidden, kKvHeads * kHeadDim)),
        out_(weight(kHeads * kHeadDim, kHidden)) {}

  // hidden [B, T, hidden] of the tokens that follow what the cache holds.
  at::Tensor forward(const at::Tensor& hidden,
                     const c10::intrusive_ptr<h2o_prefill::ChunkedKVCache>& cache,
                     const c10::intrusive_ptr<h2o_prefill::MemorySetTracker>& tracker) const {
    const int64_t past = cache->length(/*layer=*/0);
    const auto normed = hidden * at::rsqrt(hidden.square().mean(-1, /*keepdim=*/true) + 1e-6);
    const auto attended =
        attention_.forward(/*layer=*/0, apply_rope(split_heads(normed.matmul(query_)), past),
                           apply_rope(split_heads(normed.matmul(key_)), past),
                           split_heads(normed.matmul(value_)), cache, tracker);
    return hidden + attended.transpose(1, 2).flatten(2).matmul(out_);
  }

 private:
  static at::Tensor weight(int64_t in, int64_t out) {
    return at::randn({in, out}) / std::sqrt(static_cast<double>(in));
  }

  static at::Tensor split_heads(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), -1, kHeadDim}).transpose(1, 2);
  }

  h2o_prefill::ChunkedSparseAttention attention_;
  at::Tensor query_;
  at::Tensor key_;
  at::Tensor value_;
  at::Tensor out_;
};

void run(int64_t prompt) {
  h2o_prefill::PrefillConfig config;
  config.chunk_size = 1024;
  config.local_window = 128;
  config.heavy_budget = 128;
  const auto cache = c10::make_intrusive<h2o_prefill::ChunkedKVCache>(
      /*num_layers=*/1, /*initial_capacity=*/2048, /*max_capacity=*/prompt + 1);
  const auto tracker = c10::make_intrusive<h2o_prefill::MemorySetTracker>(
      /*num_layers=*/1, config.local_window, config.heavy_budget, config.sink_tokens);
  const DecoderLayer layer(config);

  // A call that ends with a whole chunk continues as if both calls had been one.
  const int64_t first = prompt / 2 / config.chunk_size * config.chunk_size;
  for (const int64_t tokens : {first, prompt - first, int64_t{1}}) {
    const auto out = layer.forward(at::randn({1, tokens, kHidden}), cache, tracker);
    const char* how = tokens >= config.sparse_from() ? "sparse" : "dense";
    std::cout << tokens << " tokens, " << how << ": output " << out.sizes() << ", the cache holds "
              << cache->length(0) << " of " << cache->capacity(0) << '\n';
  }

  const auto memory = tracker->indices(0)[0][0];
  const auto scores = tracker->scores(0)[0][0];
  std::cout << "KV head 0 remembers " << memory.ge(0).sum().item<int64_t>()
            << " positions; most attended: position " << scores.argmax().item<int64_t>()
            << ", score " << scores.max().item<double>() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int64_t prompt = argc > 1 ? std::stoll(argv[1]) : 6000;
    if (prompt < 2048) {
      std::cerr << "the prompt must have at least 2048 tokens, got " << prompt << '\n';
      return 2;
    }
    std::cout << "h2o_prefill " << h2o_prefill::version()
              << ", CPU kernels: " << h2o_prefill::cpu_isa() << '\n';
    run(prompt);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
