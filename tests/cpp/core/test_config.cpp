#include "h2o_prefill/config.h"

#include "h2o_prefill/crossover.h"
#include "h2o_prefill/library.h"
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
  EXPECT_EQ(PrefillConfig::preset("h2o"), PrefillConfig{.min_prefill = PrefillConfig::kAuto});
  EXPECT_EQ(PrefillConfig().to_string(), "h2o,min_prefill=none");
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
  EXPECT_EQ(PrefillConfig::parse("min_prefill=none"), PrefillConfig());
  EXPECT_VALUE_ERROR(PrefillConfig::parse("h2o,min_prefill=5,min_prefill=none"),
                     "min_prefill must be given once, got \"min_prefill=5,min_prefill=none\"");
}

TEST(PrefillConfig, AnOpenMinPrefillIsResolvedByTheLengthOfAPrompt) {
  const auto open = PrefillConfig::parse("recommended,min_prefill=auto");
  EXPECT_EQ(open, PrefillConfig::preset("recommended"));
  EXPECT_EQ(open.sparse_from(), 1024);
  EXPECT_EQ(open.resolved(3000, 3000).min_prefill, 1024);
  EXPECT_EQ(open.resolved(3000, 2999).min_prefill, 3000);
  const auto given = PrefillConfig::parse("recommended,min_prefill=7");
  EXPECT_EQ(given.resolved(3000, 1), given);
  EXPECT_TRUE(given.matches(open) && open.matches(given));
  EXPECT_FALSE(given.matches(PrefillConfig::parse("recommended,min_prefill=8")));
  EXPECT_FALSE(open.matches(PrefillConfig::parse("h2o,min_prefill=8")));
}

// At a cost of 1 a prompt is sparse from where one head has 5 % fewer products.
TEST(Crossover, ShortestSparsePromptHasFewerProducts) {
  const auto config = PrefillConfig::parse("h2o,chunk_size=16,local_window=3,heavy_budget=5");
  const auto gain = [](int64_t tokens) {
    double dense = 0, sparse = 0;
    for (int64_t row = 0; row < tokens; ++row) {
      const int64_t begin = row / 16 * 16;
      dense += static_cast<double>(row + 1);
      sparse += static_cast<double>(row - begin + 1 + (begin > 0 ? 8 : 0));
    }
    return dense / sparse;
  };
  for (const double cost : {1.0, 1.5, 4.0}) {
    const int64_t shortest = shortest_sparse_prompt(config, cost, 2, 2);
    EXPECT_GE(gain(shortest), 1.05 * cost);
    EXPECT_LT(gain(shortest - 2), 1.05 * cost);
  }
}

TEST(Crossover, LargerSetsNeedLongerPrompts) {
  const auto shortest = [](const char* fields) {
    return shortest_sparse_prompt(PrefillConfig::preset("h2o").with(fields), 1.5, 2, 2);
  };
  const int64_t plain = shortest("heavy_budget=256");
  for (const char* fields : {"heavy_budget=512", "sink_tokens=200", "wide=1x2", "wide=1.0x4",
                             "recall=8", "error_rows=8,max_widen=2", "dense_tail=512"}) {
    EXPECT_GT(shortest(fields), plain) << fields;
  }
  EXPECT_EQ(shortest("dense_layers=1"), plain);
  EXPECT_GT(shortest("heavy_budget=4194304"), int64_t{1} << 30);  // never
}

TEST(Crossover, UnmeasuredDevicesAreAssumedToBeSlow) {
  EXPECT_EQ(device_cost(at::empty({0})).device, cpu_isa());
  const auto unknown = device_cost(at::empty({0}, at::device(at::kMeta)));
  EXPECT_FALSE(unknown.measured);
  EXPECT_GT(unknown.sparse_product, 6.0);
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
