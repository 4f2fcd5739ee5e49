#include "h2o_prefill/config.h"

#include "testing.h"

namespace h2o_prefill {
namespace {

TEST(PrefillConfig, DefaultsAreTheAlgorithmWithoutOptions) {
  const PrefillConfig config;
  EXPECT_NO_THROW(config.validate());
  EXPECT_EQ(config.memory_size(), config.local_window + config.heavy_budget);
  EXPECT_EQ(config.sparse_from(), config.chunk_size);
  EXPECT_EQ(config.sink_tokens, 0);
  EXPECT_EQ(config.dense_tail, 0);
  EXPECT_EQ(config.gqa_reduce, "sum");
  EXPECT_FALSE(config.is_dense_layer(0));
}

TEST(PrefillConfig, DerivedValuesFollowTheFields) {
  PrefillConfig config{.chunk_size = 64, .local_window = 8, .heavy_budget = 16, .sink_tokens = 4};
  config.dense_layers = {0, 3};
  config.min_prefill = 5;
  EXPECT_NO_THROW(config.validate());
  EXPECT_EQ(config.memory_size(), 28);
  EXPECT_EQ(config.sparse_from(), 5);
  EXPECT_TRUE(config.is_dense_layer(3));
  EXPECT_FALSE(config.is_dense_layer(2));
}

TEST(PrefillConfig, BudgetsMayExceedTheChunk) {
  EXPECT_NO_THROW(
      (PrefillConfig{.chunk_size = 4, .local_window = 100, .heavy_budget = 100}.validate()));
  EXPECT_NO_THROW(
      (PrefillConfig{.chunk_size = 4, .local_window = 0, .heavy_budget = 0}.validate()));
}

TEST(PrefillConfig, ErrorsNameFieldRuleAndValue) {
  EXPECT_VALUE_ERROR(PrefillConfig{.chunk_size = 0}.validate(), "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR(PrefillConfig{.local_window = -3}.validate(),
                     "local_window must be >= 0, got -3");
  EXPECT_VALUE_ERROR(PrefillConfig{.heavy_budget = -1}.validate(),
                     "heavy_budget must be >= 0, got -1");
  EXPECT_VALUE_ERROR(PrefillConfig{.sink_tokens = -2}.validate(),
                     "sink_tokens must be >= 0, got -2");
  EXPECT_VALUE_ERROR(PrefillConfig{.dense_tail = -1}.validate(), "dense_tail must be >= 0, got -1");
  EXPECT_VALUE_ERROR(PrefillConfig{.min_prefill = 0}.validate(), "min_prefill must be >= 1, got 0");
  EXPECT_VALUE_ERROR(PrefillConfig{.recall_block = 0}.validate(),
                     "recall_block must be >= 1, got 0");
  EXPECT_VALUE_ERROR((PrefillConfig{.dense_layers = {1, -4}}.validate()),
                     "dense_layers must be >= 0, got -4");
  EXPECT_VALUE_ERROR(PrefillConfig{.gqa_reduce = "mean"}.validate(),
                     "gqa_reduce must be \"sum\" or \"max\", got \"mean\"");
}

}  // namespace
}  // namespace h2o_prefill
