#include "h2o_prefill/library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <set>

#include "kernels/cpu/cpu_features.h"
#include "testing.h"

namespace h2o_prefill {
namespace {

TEST(Library, InitMayBeCalledTwice) {
  init();
  init();
}

TEST(Library, VersionIsThatOfTheProject) { EXPECT_EQ(version(), H2O_EXPECTED_VERSION); }

TEST(Library, IsaIsOneThatIsCompiled) {
  EXPECT_TRUE(
      (std::set<std::string>{"amx", "avx512_bf16", "avx512", "avx2", "neon", "scalar"}.count(
          cpu_isa())))
      << cpu_isa();
}

// The CPUs that are known, whichever this is.
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x19}));   // Zen 4
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x1A}));   // Zen 5
static_assert(!has_fast_bfloat16_products({"AuthenticAMD", 0x17}));  // Zen 2
static_assert(!has_fast_bfloat16_products({"GenuineIntel", 0x06}));

TEST(Library, OpsAreRegistered) {
  for (const char* name : {"intra_chunk_attention", "memory_attention", "merge_states",
                           "select_memory", "accumulate_scores_", "gather_rows", "dense_attention",
                           "chunked_sparse_attention", "prefill_attention", "prefill_attention_",
                           "advance_position_", "lexical_recall", "recall_at_position"}) {
    const auto op =
        c10::Dispatcher::singleton().findSchema({std::string("h2o_prefill::") + name, ""});
    EXPECT_TRUE(op.has_value()) << name;
  }
}

TEST(Library, ClassesAreRegistered) {
  for (const char* name :
       {"PrefillConfig", "ChunkManager", "ChunkedKVCache", "MemorySetTracker",
        "ChunkedSparseAttention", "PrefillContext", "ChunkwiseLinearAttention"}) {
    EXPECT_TRUE(torch::getCustomClass(std::string("__torch__.torch.classes.h2o_prefill.") + name))
        << name;
  }
}

}  // namespace
}  // namespace h2o_prefill
