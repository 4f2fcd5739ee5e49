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
