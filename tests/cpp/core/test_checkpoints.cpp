// At its checkpoints a context goes back to the prompt that was never longer.
#include <gtest/gtest.h>

#include "h2o_prefill/prefill_context.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kCheckpointedLayers = 2, kCheckpointedTokens = 130;

PrefillContext checkpointed_context(const std::string& more, bool checkpoints) {
  return {kCheckpointedLayers, /*max_tokens=*/200,
          PrefillConfig::parse(
              "recommended,min_prefill=none,chunk_size=16,local_window=3,heavy_budget=4" + more),
          checkpoints};
}

at::Tensor run_layers(PrefillContext& context, const std::vector<Qkv>& layers, int64_t begin,
                      int64_t end) {
  context.begin(at::arange(begin, end).remainder(11).expand({2, end - begin}));
  std::vector<at::Tensor> outs;
  for (int64_t layer = 0; layer < kCheckpointedLayers; ++layer) {
    const Qkv x = layers[layer].tokens(begin, end);
    outs.push_back(context.attend(layer, x.q, x.k, x.v));
  }
  return at::stack(outs);
}

std::vector<Qkv> random_layers() {
  return {random_qkv(kCheckpointedTokens), random_qkv(kCheckpointedTokens)};
}

void expect_exact_truncation(const std::string& more) {
  const auto layers = random_layers();
  auto context = checkpointed_context(more, true);
  run_layers(context, layers, 0, 70);
  run_layers(context, layers, 70, 71);  // decoded
  EXPECT_EQ(context.checkpoint_before(71), 71);
  EXPECT_EQ(context.checkpoint_before(500), 71);
  for (const auto& [length, expected] :
       {std::pair<int64_t, int64_t>{70, 70}, {69, 64}, {64, 64}, {63, 48}, {16, 16}, {15, 0}}) {
    EXPECT_EQ(context.checkpoint_before(length), expected);
  }
  for (const int64_t length : {64, 48, 16}) {
    context.truncate(length);
    EXPECT_EQ(context.checkpoint_before(length + 5), length);
    auto alone = checkpointed_context(more, true);
    run_layers(alone, layers, 0, length);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{length, length + 32},
                                     {length + 32, length + 33},
                                     {length + 33, kCheckpointedTokens}}) {
      const auto expected = run_layers(alone, layers, begin, end);
      EXPECT_TRUE(same(run_layers(context, layers, begin, end), expected));
    }
    // The last call did not begin at a checkpoint.
    EXPECT_EQ(context.checkpoint_before(kCheckpointedTokens - 1), length + 32);
    for (int64_t layer = 0; layer < kCheckpointedLayers; ++layer) {
      EXPECT_TRUE(same(context.tracker()->indices(layer), alone.tracker()->indices(layer)));
      EXPECT_TRUE(same(context.tracker()->errors(layer), alone.tracker()->errors(layer)));
    }
  }
}

TEST(Checkpoints, TruncateIsExact) {
  for (const char* const more : {"", ",error_rows=4,error_threshold=0.01", ",recall=0"}) {
    SCOPED_TRACE(more);
    expect_exact_truncation(more);
  }
}

TEST(Checkpoints, AnInterruptedCallLeavesThem) {
  const auto layers = random_layers();
  auto context = checkpointed_context("", true);
  run_layers(context, layers, 0, 64);
  context.begin(at::arange(32).expand({2, 32}));
  const Qkv x = layers[0].tokens(64, 96);
  context.attend(0, x.q, x.k, x.v);
  EXPECT_EQ(context.checkpoint_before(64), 64);
  context.truncate(64);
  EXPECT_EQ(context.checkpoint_before(40), 32);
  auto straight = checkpointed_context("", true);
  run_layers(straight, layers, 0, 64);
  EXPECT_TRUE(same(run_layers(context, layers, 64, 96), run_layers(straight, layers, 64, 96)));
  EXPECT_EQ(context.checkpoint_before(95), 80);
}

TEST(Checkpoints, NoneAreKeptUnlessAskedFor) {
  const auto layers = random_layers();
  auto context = checkpointed_context("", false),
       tail = checkpointed_context(",dense_tail=4", true);
  for (PrefillContext* one : {&context, &tail}) {
    run_layers(*one, layers, 0, 64);
    EXPECT_EQ(one->checkpoint_before(63), 0);
    EXPECT_EQ(one->checkpoint_before(64), 64);
    one->truncate(40);
    EXPECT_EQ(one->length(), 40);
  }
  EXPECT_VALUE_ERROR_WITH(context.checkpoint_before(-1), "length must be >= 0");
}

}  // namespace
}  // namespace h2o_prefill::testing
