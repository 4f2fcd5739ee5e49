#include "h2o_prefill/config.h"

#include "h2o_prefill/crossover.h"
#include "h2o_prefill/library.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(PrefillConfig, TextsNameThePresetThatIsNearest) {
  EXPECT_EQ(PrefillConfig::preset_names(),
            (std::vector<std::string>{"exact", "recommended", "h2o"}));
  EXPECT_EQ(PrefillConfig().to_string(), "h2o,min_prefill=none");
  EXPECT_EQ(PrefillConfig::parse("min_prefill=5,dense_layers=0").to_string(),
            "h2o,dense_layers=0,min_prefill=5");
  const char* const text = "recommended,local_window=256,dense_layers=7+17";
  EXPECT_EQ(PrefillConfig::parse(text).to_string(), text);
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
    const int64_t shortest = shortest_sparse_prompt(config, cost);
    EXPECT_GE(gain(shortest), 1.05 * cost);
    EXPECT_LT(gain(shortest - 2), 1.05 * cost);
  }
}

TEST(Crossover, LargerSetsNeedLongerPrompts) {
  const auto shortest = [](const char* fields) {
    return shortest_sparse_prompt(PrefillConfig::preset("h2o").with(fields), 1.5);
  };
  const int64_t plain = shortest("heavy_budget=256");
  for (const char* fields : {"heavy_budget=512", "sink_tokens=200", "recall=8",
                             "error_rows=8,max_widen=2", "dense_tail=512"}) {
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
  EXPECT_NE(config.advice()[0].find("every call is dense"), std::string::npos);
}

}  // namespace
}  // namespace h2o_prefill::testing
