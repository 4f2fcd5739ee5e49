// Checkpoints of prefill_attention_: the state at each multiple of the chunk size, of one call.
#include <string>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kCheckpointChunk = 16, kCheckpointedLength = 5 * kCheckpointChunk;

void expect_checkpoints_are_the_state(const std::string& more) {
  const std::string settings = "h2o,chunk_size=16,local_window=3,heavy_budget=4" + more;
  const auto config = PrefillConfig::parse(settings).of_layer(0);
  const int64_t size = config.memory_size();
  const auto x = random_qkv(kCheckpointedLength);
  PrefillBuffers buffers{.key = at::empty({2, 2, kCheckpointedLength, 8}),
                         .value = at::empty({2, 2, kCheckpointedLength, kValueDim}),
                         .scores = at::zeros({2, 2, kCheckpointedLength}),
                         .memory = at::full({2, 2, size}, -1, at::kInt),
                         .errors = at::zeros({2, 2, kErrorFields})};
  Checkpoints kept{.memory = at::empty({5, 2, 2, size}, at::kInt),
                   .scores = at::empty({5, 2, 2, size}),
                   .errors = at::empty({5, 2, 2, kErrorFields})};
  prefill_attention_(x.q, x.k, x.v, buffers, at::zeros({2}, at::kLong), 0, settings, {},
                     std::nullopt, std::nullopt, 0.0, std::nullopt, kept);
  for (int64_t i = 0; i < 5; ++i) {
    const int64_t end = (i + 1) * kCheckpointChunk;
    const auto first = x.call(0, end);
    const auto [out, state] = chunked_sparse_attention(first.q, first.k, first.v, {}, config);
    const auto at_end = gather_rows(state.scores.unsqueeze(3), kept.memory[i]).squeeze(3);
    EXPECT_TRUE(same(kept.scores[i], at_end));
    EXPECT_TRUE(same(kept.errors[i], state.errors));
    if (end == kCheckpointedLength) continue;
    // The next chunk attends to the set.
    const auto more = x.call(0, end + 1);
    const auto [unused, next] = chunked_sparse_attention(more.q, more.k, more.v, {}, config);
    EXPECT_TRUE(same(kept.memory[i], next.memory));
  }
}

TEST(PrefillAttentionCheckpoints, AreTheStateThere) {
  for (const char* const more :
       {"", ",sink_tokens=2", ",wide=0.1x2,error_rows=4,error_threshold=0.01"}) {
    SCOPED_TRACE(more);
    expect_checkpoints_are_the_state(more);
  }
}

}  // namespace
}  // namespace h2o_prefill::testing
