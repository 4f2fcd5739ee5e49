// Uses one of everything that the installed package offers, and checks the result.
#include <ATen/ATen.h>
#include <h2o_prefill/chunk_manager.h>
#include <h2o_prefill/chunked_kv_cache.h>
#include <h2o_prefill/chunked_sparse_attention.h>
#include <h2o_prefill/config.h>
#include <h2o_prefill/crossover.h>
#include <h2o_prefill/layer_state.h>
#include <h2o_prefill/library.h>
#include <h2o_prefill/memory_set_tracker.h>
#include <h2o_prefill/ops.h>
#include <h2o_prefill/package.h>
#include <h2o_prefill/prefill_context.h>
#include <h2o_prefill/version.h>

#include <iostream>

int main() {
  h2o_prefill::init();
  const auto q = at::randn({1, 4, 100, 32}), k = at::randn({1, 2, 100, 32}),
             v = at::randn({1, 2, 100, 32});

  // Budgets as large as the prompt: sparse attention must be the dense one.
  h2o_prefill::PrefillConfig config;
  config.chunk_size = 32;
  config.local_window = 50;
  config.heavy_budget = 50;
  const auto cache = c10::make_intrusive<h2o_prefill::ChunkedKVCache>(1, 64, 128);
  const auto tracker = c10::make_intrusive<h2o_prefill::MemorySetTracker>(1, 50, 50, 0);
  const h2o_prefill::ChunkedSparseAttention attention(config);
  const auto out = attention.forward(0, q, k, v, cache, tracker);
  const auto dense = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, {},
                                                      /*enable_gqa=*/true);

  const auto memory =
      h2o_prefill::select_memory(tracker->scores(0), tracker->indices(0), 96, 100, 4, 4, 1);
  h2o_prefill::PrefillContext context(/*num_layers=*/1, /*max_tokens=*/100, config);
  context.begin(at::arange(100).unsqueeze(0));
  // Fields that are left out are no warning.
  [[maybe_unused]] const h2o_prefill::PrefillBuffers buffers{.key = k, .value = v};
  [[maybe_unused]] const h2o_prefill::LayerState state;
  [[maybe_unused]] const h2o_prefill::PackageInfo package{.model = "x"};
  [[maybe_unused]] const h2o_prefill::DeviceCost cost{.measured = true};
  static_assert(H2O_PREFILL_VERSION_NUMBER >= H2O_PREFILL_MAKE_VERSION(0, 1, 0));
  const bool right =
      at::equal(context.attend(0, q, k, v), out) && h2o_prefill::version() == H2O_PREFILL_VERSION &&
      at::allclose(out, dense, 1e-4, 1e-5) && memory.size(2) == 9 && cache->length(0) == 100 &&
      tracker->last_chunk_begin(0) == h2o_prefill::ChunkManager(0, 100, 32).last_chunk_begin();
  std::cout << "h2o_prefill " << h2o_prefill::version() << (right ? ": right\n" : ": wrong\n");
  return right ? 0 : 1;
}
