// The classes as registered: pickled, and used from TorchScript.
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/custom_class.h>
#include <torch/script.h>

#include <sstream>

#include "h2o_prefill/chunk_manager.h"
#include "h2o_prefill/chunked_sparse_attention.h"
#include "h2o_prefill/prefill_context.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

PrefillConfig saved_config() {
  return {.chunk_size = 16,
          .local_window = 3,
          .heavy_budget = 4,
          .dense_layers = {1},
          .min_prefill = 20};
}

// Lets scripts name the classes.
struct Names : torch::jit::Resolver {
  c10::TypePtr resolveType(const std::string& name, const torch::jit::SourceRange&) override {
    return torch::getCustomClass("__torch__.torch.classes.h2o_prefill." + name);
  }
};

// Through an archive in memory.
template <typename Class>
c10::intrusive_ptr<Class> round_trip(const c10::intrusive_ptr<Class>& object) {
  torch::jit::Module holder("Holder");
  holder.register_attribute("held", c10::getCustomClassType<c10::intrusive_ptr<Class>>(), object);
  std::stringstream archive;
  holder.save(archive);
  return torch::jit::load(archive).attr("held").toCustomClass<Class>();
}

TEST(RegisteredClasses, ChunkManagerIsSavedWhole) {
  const auto chunks = round_trip(c10::make_intrusive<ChunkManager>(5, 17, 8));
  EXPECT_EQ(chunks->past(), 5);
  EXPECT_EQ(chunks->num_tokens(), 17);
  EXPECT_EQ(chunks->chunk_size(), 8);
}

TEST(RegisteredClasses, AttentionIsSavedWithEverySetting) {
  const PrefillConfig config{32, 3, 4, 5, 6, {7, 8}, {1}, 2, "max", 9, 2, 16, 4, 5, 7, true};
  EXPECT_EQ(round_trip(c10::make_intrusive<ChunkedSparseAttention>(config))->config(), config);
}

TEST(RegisteredClasses, CacheAndTrackerAreSavedWhole) {
  const auto x = random_qkv(40);
  const auto cache = c10::make_intrusive<ChunkedKVCache>(2, 8, 64);
  const auto tracker = c10::make_intrusive<MemorySetTracker>(2, 3, 4, 0);
  ChunkedSparseAttention(saved_config()).forward(0, x.q, x.k, x.v, cache, tracker);
  const auto loaded_cache = round_trip(cache);
  EXPECT_TRUE(same(loaded_cache->key(0), x.k));
  EXPECT_EQ(loaded_cache->length(1), 0);
  EXPECT_EQ(loaded_cache->max_capacity(), 64);
  const auto loaded_tracker = round_trip(tracker);
  EXPECT_TRUE(same(loaded_tracker->scores(0), tracker->scores(0)));
  EXPECT_TRUE(same(loaded_tracker->indices(0), tracker->indices(0)));
  EXPECT_EQ(loaded_tracker->last_chunk_begin(0), 32);
}

TEST(RegisteredClasses, ScriptUndoesACall) {
  torch::jit::Module module("Script");
  module.define(R"(
    def forward(self, ids, q, k, v, context: PrefillContext):
        context.begin(ids)
        context.attend(0, q, k, v)
        context.truncate(context.length())
        return context.length()
  )",
                std::make_shared<Names>());
  const auto x = random_qkv(50);
  const auto ids = at::zeros({2, 50}, at::kLong);
  const auto context = c10::make_intrusive<PrefillContext>(2, 64, saved_config());
  EXPECT_EQ(module.forward({ids, x.q, x.k, x.v, context}).toInt(), 0);
  EXPECT_FALSE(context->tracker()->has_scores(0));
  EXPECT_EQ(context->cache()->length(0), 0);
}

}  // namespace
}  // namespace h2o_prefill::testing
