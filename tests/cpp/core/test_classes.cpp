// What Python does not see of the classes, and the functions of ops.h.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cctype>

#include "h2o_prefill/crossover.h"
#include "h2o_prefill/library.h"
#include "h2o_prefill/ops.h"
#include "kernels/cpu/cpu_features.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(Library, InitMayBeCalledTwice) {
  init();
  init();
}

TEST(Library, FeaturesOfTheCpuHoldThoseOfItsKernels) {
  const std::string features = cpu_features() + " ";
  for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
    std::string name = isa;
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
    EXPECT_EQ(features.find(" " + name + " ") != std::string::npos, cpu_has(isa)) << features;
  }
}

// The CPUs that are known, whichever this is.
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x19}));   // Zen 4
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x1A}));   // Zen 5
static_assert(!has_fast_bfloat16_products({"AuthenticAMD", 0x17}));  // Zen 2
static_assert(!has_fast_bfloat16_products({"GenuineIntel", 0x06}));

TEST(PrefillConfig, AnOpenMinPrefillIsResolvedByTheLengthOfAPrompt) {
  const auto open = PrefillConfig::parse("recommended,min_prefill=auto");
  EXPECT_EQ(open.sparse_from(), 1024);
  EXPECT_EQ(open.resolved(3000, 3000).min_prefill, 1024);
  EXPECT_EQ(open.resolved(3000, 2999).min_prefill, 3000);
  const auto closed = PrefillConfig::parse("recommended,min_prefill=7");
  EXPECT_EQ(closed.resolved(3000, 1), closed);
  EXPECT_TRUE(closed.matches(open) && open.matches(closed));
  EXPECT_FALSE(closed.matches(PrefillConfig::parse("recommended,min_prefill=8")));
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

// The results of an operator.
template <typename... Args>
std::vector<at::Tensor> called(const char* name, const Args&... args) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  std::vector<c10::IValue> stack{args...};
  op.callBoxed(stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& result : stack) results.push_back(result.toTensor());
  return results;
}

template <typename Results>
void expect_same(const Results& results, const std::vector<at::Tensor>& expected) {
  const auto all =
      std::apply([](const auto&... each) { return std::vector<at::Tensor>{each...}; }, results);
  ASSERT_EQ(all.size(), expected.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(same(all[i], expected[i]));
}

// Those that the classes do not call themselves. The operators are compared with the reference in
// Python.
TEST(Ops, FunctionsHandEveryArgumentToTheirOperators) {
  const auto [q, k, v] = random_qkv(40);
  const auto sinks = at::arange(4, at::kFloat), indices = at::arange(3, at::kInt).expand({2, 2, 3});
  const auto part = intra_chunk_attention(q, k, v, 16, 0.3);
  expect_same(part, called("h2o_prefill::intra_chunk_attention", q, k, v, 16, 0.3));
  const auto kept = memory_attention(q, k, v, indices, 0.3);
  expect_same(kept, called("h2o_prefill::memory_attention", q, k, v, indices, 0.3));
  EXPECT_TRUE(same(dense_attention(q, k, v, 0.3, sinks, 1.5),
                   called("h2o_prefill::dense_attention", q, k, v, 0.3, sinks, 1.5)[0]));
  expect_same(sliding_window_attention(q, k, v, 10, 0.3, sinks, 1.5),
              called("h2o_prefill::sliding_window_attention", q, k, v, 10, 0.3, sinks, 1.5));
  const auto& [out, lse, sums] = part;
  const auto& [other, lse_b, votes] = kept;
  expect_same(merge_states(out, lse, other, lse_b),
              called("h2o_prefill::merge_states", out, lse, other, lse_b));
  EXPECT_TRUE(same(gather_rows(k, indices), called("h2o_prefill::gather_rows", k, indices)[0]));
}

}  // namespace
}  // namespace h2o_prefill::testing
