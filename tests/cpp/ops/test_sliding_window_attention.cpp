#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(SlidingWindowAttention, EqualsMaskedSoftmax) {
  const auto x = random_qkv(1500, 4, 2);
  for (const int64_t window : {1, 40, 1100, 5000}) {
    for (const int64_t rows : {1, 70, 1200}) {
      const auto call = x.call(1500 - rows, 1500);
      const auto visible = causal_mask(rows, 1500).triu(std::max(1500 - rows - window + 1, -rows));
      const auto expected = attend(call, visible);
      const auto [out, lse] = sliding_window_attention(call.q, call.k, call.v, window);
      EXPECT_TRUE(close(out, expected.out)) << rows << " rows, window " << window;
      EXPECT_TRUE(close(lse, expected.lse)) << rows << " rows, window " << window;
    }
  }
}

TEST(SlidingWindowAttention, WrongArguments) {
  const auto x = random_qkv(40);
  EXPECT_VALUE_ERROR(sliding_window_attention(x.q, x.k, x.v, 0), "window must be >= 1, got 0");
}

}  // namespace
}  // namespace h2o_prefill::testing
