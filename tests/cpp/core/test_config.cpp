#include "h2o_prefill/config.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(PrefillConfig, ErrorsNameFieldRuleAndValue) {
  EXPECT_VALUE_ERROR(PrefillConfig{.chunk_size = 0}.validate(), "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR(PrefillConfig{.min_prefill = 0}.validate(), "min_prefill must be >= 1, got 0");
  EXPECT_VALUE_ERROR((PrefillConfig{.dense_layers = {1, -4}}.validate()),
                     "dense_layers must be >= 0, got -4");
  EXPECT_VALUE_ERROR(PrefillConfig{.gqa_reduce = "mean"}.validate(),
                     "gqa_reduce must be \"sum\" or \"max\", got \"mean\"");
}

TEST(PrefillConfig, PresetsAndTexts) {
  EXPECT_EQ(PrefillConfig::preset_names(),
            (std::vector<std::string>{"exact", "recommended", "h2o"}));
  EXPECT_EQ(PrefillConfig::preset("h2o"), PrefillConfig());
  EXPECT_EQ(PrefillConfig().to_string(), "h2o");
  EXPECT_FALSE(PrefillConfig::preset("exact").is_sparse(0, 0, 4096));
  const auto recommended = PrefillConfig::preset("recommended");
  EXPECT_GT(recommended.recall, 0);
  auto config = PrefillConfig::parse("recommended,local_window=256,wide=7x4+17x4");
  EXPECT_EQ(config.to_string(), "recommended,local_window=256,wide=7x4+17x4");
  EXPECT_EQ(config.wide, (std::vector<std::vector<int64_t>>{{7, 4}, {17, 4}}));
  config.local_window = recommended.local_window;
  config.wide = {};
  EXPECT_EQ(config, recommended);
  EXPECT_EQ(PrefillConfig::parse("min_prefill=5,dense_layers=0").to_string(),
            "h2o,dense_layers=0,min_prefill=5");
  EXPECT_EQ(PrefillConfig::parse("h2o,min_prefill=none"), PrefillConfig());
  EXPECT_VALUE_ERROR(PrefillConfig::parse("h2o,min_prefill=5,min_prefill=none"),
                     "min_prefill must be given once, got \"min_prefill=5,min_prefill=none\"");
}

TEST(PrefillConfig, WideLayersHaveLargerBudgets) {
  const auto config = PrefillConfig::parse("h2o,sink_tokens=2,wide=3x3");
  EXPECT_EQ(config.of_layer(0), PrefillConfig::parse("h2o,sink_tokens=2"));
  const auto wide = config.of_layer(3);
  EXPECT_EQ(wide.local_window, 768);
  EXPECT_EQ(wide.memory_size(), 2 * 768 + 2);
  EXPECT_EQ(wide.of_layer(3), wide);
  EXPECT_VALUE_ERROR(PrefillConfig::parse("h2o,wide=1x4194304,max_widen=2,error_rows=1"),
                     "a factor of local_window or heavy_budget must be <= 4194304, got 8388608");
  EXPECT_VALUE_ERROR(PrefillConfig::parse("h2o,wide=1x4194304"),
                     "local_window and heavy_budget, multiplied by their factors, must be <= "
                     "4194304, got 1073741824");
}

TEST(PrefillConfig, WideHeadsAndWidening) {
  const char* const text =
      "h2o,sink_tokens=2,wide=7.2x3+8.0x4,error_rows=8,error_threshold=0.05,max_widen=2";
  const auto config = PrefillConfig::parse(text);
  EXPECT_EQ(config.to_string(), text);
  EXPECT_EQ(PrefillConfig::parse(config.to_fields()), config);
  EXPECT_EQ(config.wide, (std::vector<std::vector<int64_t>>{{7, 2, 3}, {8, 0, 4}}));
  const auto layer = config.of_layer(7);
  EXPECT_EQ(layer.factor_of_head(2), 3);
  EXPECT_EQ(layer.factor_of_head(0), 1);
  EXPECT_EQ(layer.memory_size(), 2 + 2 * 3 * 512);
  EXPECT_EQ(config.of_layer(1).memory_size(), 2 + 2 * 512);
  EXPECT_FALSE(config.of_layer(0).widens());
  const auto both = PrefillConfig::parse("h2o,wide=7x3+7.2x1+8.2x9");
  EXPECT_EQ(both.of_layer(7).factor_of_head(0), 3);
  EXPECT_EQ(both.of_layer(7).factor_of_head(2), 1);
  EXPECT_EQ(both.factor_of_head(2, 7), 1);
  EXPECT_EQ(both.factor_of_head(2), 9);
  EXPECT_EQ(both.of_layer(7).memory_size(), 3 * 512);
  EXPECT_VALUE_ERROR_WITH(PrefillConfig::parse("h2o,wide=7.2"), "like 7x4+18.2x2, or none");
  EXPECT_VALUE_ERROR(PrefillConfig::parse("h2o,wide=7.2x3+7.2x4"),
                     "wide must name a layer or head once, got 7.2x4 after another factor");
  EXPECT_VALUE_ERROR(
      (PrefillConfig{.wide = {{1}}}.check()),
      "wide must have a layer and a factor, or a layer, a KV head and a factor, got 1");
  EXPECT_VALUE_ERROR(PrefillConfig{.error_threshold = -1}.check(),
                     "error_threshold must be a finite number >= 0, got -1");
}

TEST(PrefillConfig, DecodingAndEmptyMemorySetsAreDense) {
  auto config = PrefillConfig::parse("h2o,min_prefill=1,dense_layers=2");
  EXPECT_TRUE(config.is_sparse(0, 0, 1));
  EXPECT_FALSE(config.is_sparse(0, 7, 1));
  EXPECT_TRUE(config.is_sparse(0, 7, 2));
  EXPECT_FALSE(config.is_sparse(2, 7, 2));
  EXPECT_TRUE(config.is_sparse_call(7, 2));
  EXPECT_EQ(config.last_chunk_begin(7, 2048), 7 + 1024);
  EXPECT_EQ(config.last_chunk_begin(7, 0), 7);
  config = PrefillConfig::parse("h2o,local_window=0,heavy_budget=0");
  EXPECT_FALSE(config.is_sparse(0, 0, 4096));
  ASSERT_EQ(config.advice().size(), 1U);
  EXPECT_NE(config.advice()[0].find("block_diagonal=true"), std::string::npos);
  EXPECT_TRUE(config.with("block_diagonal=true").is_sparse(0, 0, 4096));
  EXPECT_TRUE(config.with("block_diagonal=true").advice().empty());
}

}  // namespace
}  // namespace h2o_prefill::testing
