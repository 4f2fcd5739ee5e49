#include "h2o_prefill/prefill_context.h"

#include <c10/core/InferenceMode.h>

#include <cstdio>
#include <thread>
#include <type_traits>

#include "h2o_prefill/crossover.h"
#include "h2o_prefill/ops.h"
#include "h2o_prefill/package_session.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kLayers = 2, kTokens = 90;

PrefillConfig recalling_config() {
  return PrefillConfig::parse(
      "recommended,chunk_size=16,local_window=3,heavy_budget=4,recall=2,error_rows=4,"
      "min_prefill=none");
}

PrefillContext new_context(const PrefillConfig& config = recalling_config()) {
  return {kLayers, kTokens, config, /*checkpoints=*/true};
}

// Token ids, and every layer's queries, keys and values.
struct Prompt {
  Prompt() {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      qkv.push_back(random_qkv(kTokens));
      at::manual_seed(layer);
      qkv.back().q.add_(at::randn_like(qkv.back().q));
    }
  }

  at::Tensor ids_of(int64_t begin, int64_t end) const { return ids.slice(1, begin, end); }

  at::Tensor attend(PrefillContext& context, int64_t layer, int64_t begin, int64_t end,
                    std::optional<int64_t> window = std::nullopt) const {
    const auto x = qkv[layer].tokens(begin, end);
    return context.attend(layer, x.q, x.k, x.v, std::nullopt, window);
  }

  // The outputs of all layers for the tokens [begin, end).
  at::Tensor run(PrefillContext& context, int64_t begin, int64_t end, bool with_ids = true,
                 std::optional<int64_t> total = std::nullopt) const {
    if (with_ids) {
      context.begin(ids_of(begin, end), total);
    } else {
      context.begin(end - begin, total);
    }
    return at::stack({attend(context, 0, begin, end), attend(context, 1, begin, end)});
  }

  at::Tensor ids = at::arange(kTokens).remainder(11).expand({2, kTokens});
  std::vector<Qkv> qkv;
};

bool is_sparse(const PrefillContext& context) { return context.tracker()->has_scores(1); }

// A copy would change with the original.
template <typename T>
constexpr bool kHasNoCopies = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kHasNoCopies<PrefillContext> && kHasNoCopies<ChunkedKVCache> &&
              kHasNoCopies<MemorySetTracker> && kHasNoCopies<Sampler> &&
              kHasNoCopies<PackageSession> && kHasNoCopies<Answer>);

TEST(PrefillContext, SettingsAreTheDefault) {
  EXPECT_EQ(PrefillContext(1, 8).config(), PrefillConfig::preset("recommended"));
}

TEST(PrefillContext, ShortPromptsAreDenseWhereMinPrefillIsOpen) {
  const Prompt prompt;
  PrefillConfig config{.chunk_size = 16, .local_window = 3, .heavy_budget = 4};
  auto expected = new_context(config);
  const auto out = prompt.run(expected, 0, 80);
  config.min_prefill = PrefillConfig::kAuto;
  const int64_t shortest =
      shortest_sparse_prompt(config, device_cost(prompt.qkv[0].k).sparse_product);
  ASSERT_GT(shortest, 16);
  ASSERT_LT(shortest, 64);

  auto whole = new_context(config), announced = new_context(config);
  EXPECT_TRUE(same(prompt.run(whole, 0, 80), out));
  EXPECT_EQ(whole.config().min_prefill, 16);
  const auto parts = {prompt.run(announced, 0, 16, true, 80), prompt.run(announced, 16, 80)};
  EXPECT_TRUE(same(at::cat(parts, 3), out));

  auto context = new_context(config);
  prompt.run(context, 0, 16);
  EXPECT_FALSE(is_sparse(context));
  EXPECT_EQ(context.config().min_prefill, shortest);
  prompt.run(context, 16, 64);  // the prompt is long enough now, and stays so
  EXPECT_TRUE(is_sparse(context));
  EXPECT_EQ(context.config().min_prefill, 16);
  const auto copy = context.clone();
  EXPECT_EQ(copy->config(), context.config());
  for (PrefillContext* of : {&context, copy.get()}) {
    of->reset();
    prompt.run(*of, 0, shortest - 1);
    EXPECT_FALSE(is_sparse(*of));
    EXPECT_EQ(of->config().min_prefill, shortest);
  }
  // The same prompt in pieces that tell its length, which is not added up.
  context.reset();
  prompt.run(context, 0, 16, true, shortest - 1);
  prompt.run(context, 16, shortest - 1, true, shortest - 1);
  EXPECT_FALSE(is_sparse(context));
}

TEST(PrefillContext, ALayerWithAWindowIsExactInIt) {
  const Prompt prompt;
  auto context = new_context();
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 70}, {70, 90}}) {
    context.begin(prompt.ids_of(begin, end));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const auto x = prompt.qkv[layer].call(begin, end);
      EXPECT_TRUE(same(prompt.attend(context, layer, begin, end, /*window=*/20),
                       std::get<0>(sliding_window_attention(x.q, x.k, x.v, 20))));
      EXPECT_FALSE(context.tracker()->has_scores(layer));
    }
  }
}

TEST(PrefillContext, WithoutIdsNothingIsRecalled) {
  const Prompt prompt;
  auto without = recalling_config();
  without.recall = 0;
  auto expected = new_context(without), context = new_context();
  EXPECT_TRUE(same(prompt.run(context, 0, 20, /*with_ids=*/false), prompt.run(expected, 0, 20)));
  EXPECT_TRUE(same(prompt.run(context, 20, 60), prompt.run(expected, 20, 60)))
      << "what stood before is not known";
  EXPECT_FALSE(context.token_ids().defined());
  context.reset();
  prompt.run(context, 0, 20);
  EXPECT_TRUE(context.token_ids().defined());
}

// Dense and sparse calls, at the beginning of a prompt and later.
TEST(PrefillContext, ACallThatFailsHalfwayIsRefusedUntilItIsRemoved) {
  const Prompt prompt;
  for (const auto& [past, end, with_ids] : {std::tuple<int64_t, int64_t, bool>{0, 8, true},
                                            {0, 40, false},
                                            {32, 40, false},
                                            {32, 72, true}}) {
    auto context = new_context(), straight = new_context();
    for (PrefillContext* each : {&context, &straight}) {
      if (past > 0) prompt.run(*each, 0, past);
    }
    with_ids ? context.begin(prompt.ids_of(past, end)) : context.begin(end - past);
    prompt.attend(context, 0, past, end);
    EXPECT_REFUSED(prompt.attend(context, 0, past, end), "layer 0 has attended already");
    EXPECT_REFUSED(context.begin(prompt.ids_of(40, 41)), "layer 0 has and others have not in the");
    if (past > 0) {
      EXPECT_REFUSED(context.save("none", "model"), "every layer must have attended in the last");
      EXPECT_EQ(context.checkpoint_before(past - 1), 16);
    }
    EXPECT_EQ(context.checkpoint_before(past), past);
    context.truncate(past);
    EXPECT_TRUE(same(prompt.run(context, past, 90), prompt.run(straight, past, 90)));
  }
}

TEST(PrefillContext, ACallThatNoLayerAttendedInIsReplaced) {
  const Prompt prompt;
  auto context = new_context();
  prompt.run(context, 0, 60);
  context.begin(prompt.ids_of(0, 5));
  context.begin(3);
  context.begin(prompt.ids_of(0, 7));
  EXPECT_TRUE(same(context.token_ids(), prompt.ids_of(0, 60)));
}

TEST(PrefillContext, SessionsOfOtherSizesAreRefused) {
  const Prompt prompt;
  const std::string path = ::testing::TempDir() + "/h2o_prefill.session";
  auto context = new_context();
  prompt.run(context, 0, 50);
  context.save(path, "model");
  EXPECT_REFUSED(PrefillContext(3, 90, recalling_config()).load(path, "model"), "have 3 layers");
  EXPECT_REFUSED(PrefillContext(2, 49, recalling_config()).load(path, "model"),
                 "at most 49 tokens");
  std::remove(path.c_str());
}

TEST(PrefillContext, WorksInInferenceModeAndOutsideOfIt) {
  const Prompt prompt;
  auto context = new_context(), straight = new_context();
  {
    const c10::InferenceMode inference;
    prompt.run(context, 0, 40);
  }
  prompt.run(straight, 0, 40);
  EXPECT_TRUE(same(prompt.run(context, 40, 70), prompt.run(straight, 40, 70)));
}

TEST(PrefillContext, ContextsOnThreadsAreIndependent) {
  const Prompt prompt;
  auto alone = new_context();
  const auto expected = prompt.run(alone, 0, 90);
  std::vector<at::Tensor> outs(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < outs.size(); ++i) {
    threads.emplace_back([&, i] {
      // Settings that no thread has read before.
      auto config = recalling_config();
      config.min_prefill = 10 + static_cast<int64_t>(i);
      auto context = new_context(config);
      for (int round = 0; round < 5; ++round) {
        context.reset();
        outs[i] = prompt.run(context, 0, 90);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& out : outs) EXPECT_TRUE(same(out, expected));
}

}  // namespace
}  // namespace h2o_prefill::testing
