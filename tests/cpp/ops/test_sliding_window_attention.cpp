#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

void check(int64_t history, const std::vector<int64_t>& windows, const std::vector<int64_t>& rows) {
  const auto x = random_qkv(history);
  for (const int64_t window : windows) {
    for (const int64_t count : rows) {
      const auto call = x.call(history - count, history);
      const int64_t hidden = std::max(history - count - window + 1, -count);
      const auto expected = attend(call, causal_mask(count, history).triu(hidden));
      const auto [out, lse] = sliding_window_attention(call.q, call.k, call.v, window);
      EXPECT_TRUE(close(out, expected.out)) << count << " rows, window " << window;
      EXPECT_TRUE(close(lse, expected.lse)) << count << " rows, window " << window;
    }
  }
}

TEST(SlidingWindowAttention, EqualsMaskedSoftmax) { check(200, {1, 40, 150, 5000}, {1, 70, 200}); }

// Several steps of the CPU kernel, of 1024 rows and keys each.
TEST(SlidingWindowAttention, LongHistoryEqualsMaskedSoftmax) { check(2500, {40, 1100}, {1200}); }

}  // namespace
}  // namespace h2o_prefill::testing
