#include "h2o_prefill/prefill_context.h"

#include <c10/core/InferenceMode.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <type_traits>

#include "h2o_prefill/crossover.h"
#include "h2o_prefill/ops.h"
#include "h2o_prefill/package_session.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kContextLayers = 2;

PrefillConfig recalling_config() {
  return PrefillConfig::parse(
      "recommended,chunk_size=16,local_window=3,heavy_budget=4,recall=2,error_rows=4,"
      "min_prefill=none");
}

PrefillContext new_context(const PrefillConfig& config = recalling_config()) {
  return {kContextLayers, /*max_tokens=*/90, config};
}

// A prompt's tokens, and every layer's queries, keys and values.
struct LayeredPrompt {
  explicit LayeredPrompt(int64_t length)
      : ids(at::arange(length).remainder(11).expand({2, length})) {
    for (int64_t layer = 0; layer < kContextLayers; ++layer) {
      qkv.push_back(random_qkv(length));
      at::manual_seed(layer);
      qkv.back().q.add_(at::randn_like(qkv.back().q));
    }
  }

  // The outputs of all layers for the tokens [begin, end).
  at::Tensor run(PrefillContext& context, int64_t begin, int64_t end, bool with_ids = true) const {
    if (with_ids) {
      context.begin(ids.slice(1, begin, end));
    } else {
      context.begin(end - begin);
    }
    std::vector<at::Tensor> outs;
    for (int64_t layer = 0; layer < kContextLayers; ++layer) {
      const auto x = qkv[layer].tokens(begin, end);
      outs.push_back(context.attend(layer, x.q, x.k, x.v));
    }
    return at::stack(outs);
  }

  at::Tensor ids;
  std::vector<Qkv> qkv;
};

// The layers of a context that have scores.
bool is_sparse(const PrefillContext& context) { return context.tracker()->has_scores(1); }

// Lengths, settings, ids, scores, memory sets and keys: everything but room in the buffers.
void expect_same_state(const PrefillContext& context, const PrefillContext& expected) {
  ASSERT_EQ(context.length(), expected.length());
  const auto ids = context.token_ids(), expected_ids = expected.token_ids();
  ASSERT_EQ(ids.defined(), expected_ids.defined());
  EXPECT_TRUE(!ids.defined() || same(ids, expected_ids));
  const auto state = context.tracker()->state_tensors();
  const auto expected_state = expected.tracker()->state_tensors();
  ASSERT_EQ(state.size(), expected_state.size());
  for (size_t i = 0; i < state.size(); ++i) EXPECT_TRUE(same(state[i], expected_state[i]));
  for (int64_t layer = 0; layer < kContextLayers; ++layer) {
    ASSERT_EQ(context.cache()->length(layer), expected.cache()->length(layer));
    if (context.length() == 0) continue;
    EXPECT_TRUE(same(context.cache()->key(layer), expected.cache()->key(layer)));
    EXPECT_TRUE(same(context.cache()->value(layer), expected.cache()->value(layer)));
  }
}

// A copy would change with the original.
template <typename T>
constexpr bool kHasNoCopies = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kHasNoCopies<PrefillContext> && kHasNoCopies<ChunkedKVCache> &&
              kHasNoCopies<MemorySetTracker> && kHasNoCopies<Sampler> &&
              kHasNoCopies<PackageSession> && kHasNoCopies<Answer>);

TEST(PrefillContext, ShortPromptsAreDenseWhereMinPrefillIsOpen) {
  const LayeredPrompt prompt(80);
  PrefillConfig config{.chunk_size = 16, .local_window = 3, .heavy_budget = 4};
  auto expected = new_context(config);
  const auto out = prompt.run(expected, 0, 80);
  config.min_prefill = PrefillConfig::kAuto;
  const int64_t shortest =
      shortest_sparse_prompt(config, device_cost(prompt.qkv[0].k).sparse_product);
  ASSERT_GT(shortest, 16);
  ASSERT_LT(shortest, 64);

  auto whole = new_context(config);
  EXPECT_TRUE(same(prompt.run(whole, 0, 80), out));
  EXPECT_EQ(whole.config().min_prefill, 16);
  auto announced = new_context(config);
  announced.begin(prompt.ids.slice(1, 0, 16), /*total_tokens=*/80);
  for (int64_t layer = 0; layer < kContextLayers; ++layer) {
    const auto x = prompt.qkv[layer].tokens(0, 16);
    announced.attend(layer, x.q, x.k, x.v);
  }
  EXPECT_TRUE(same(prompt.run(announced, 16, 80), out.narrow(3, 16, 64)));

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
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 16}, {16, shortest - 1}}) {
    context.begin(prompt.ids.slice(1, begin, end), /*total_tokens=*/shortest - 1);
    for (int64_t layer = 0; layer < kContextLayers; ++layer) {
      const auto x = prompt.qkv[layer].tokens(begin, end);
      context.attend(layer, x.q, x.k, x.v);
    }
  }
  EXPECT_FALSE(is_sparse(context));
  EXPECT_VALUE_ERROR_WITH(context.begin(1, shortest - 1), "total_tokens must be in [");
}

TEST(PrefillContext, ALayerWithAWindowIsExactInIt) {
  const LayeredPrompt prompt(90);
  auto context = new_context();
  constexpr int64_t kWindow = 20;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 70}, {70, 90}}) {
    context.begin(prompt.ids.slice(1, begin, end));
    for (int64_t layer = 0; layer < kContextLayers; ++layer) {
      const auto x = prompt.qkv[layer].call(begin, end);
      const auto tokens = prompt.qkv[layer].tokens(begin, end);
      const auto out = context.attend(layer, tokens.q, tokens.k, tokens.v, std::nullopt, kWindow);
      EXPECT_TRUE(same(out, std::get<0>(sliding_window_attention(x.q, x.k, x.v, kWindow))));
      EXPECT_FALSE(context.tracker()->has_scores(layer));
    }
  }
  context.truncate(80);
  context.begin(prompt.ids.slice(1, 80, 81));
  const auto x = prompt.qkv[0].tokens(80, 81);
  EXPECT_VALUE_ERROR_WITH(context.attend(0, x.q, x.k, x.v, std::nullopt, /*window=*/0),
                          "window must be >= 1");
}

TEST(PrefillContext, WithoutIdsNothingIsRecalled) {
  const LayeredPrompt prompt(60);
  auto without = recalling_config();
  without.recall = 0;
  auto expected = new_context(without), context = new_context();
  EXPECT_TRUE(same(prompt.run(context, 0, 20, /*with_ids=*/false), prompt.run(expected, 0, 20)));
  EXPECT_FALSE(context.token_ids().defined());
  EXPECT_TRUE(same(prompt.run(context, 20, 60), prompt.run(expected, 20, 60)))
      << "what stood before is not known";
  EXPECT_FALSE(context.token_ids().defined());
  context.reset();
  prompt.run(context, 0, 20);
  EXPECT_TRUE(context.token_ids().defined());
}

// Dense and sparse calls, with ids and without, at the beginning of a prompt and later.
TEST(PrefillContext, ACallThatFailsHalfwayIsRefusedUntilItIsRemoved) {
  const LayeredPrompt prompt(90);
  for (const int64_t past : {0, 32}) {
    for (const int64_t end : {past + 8, past + 40}) {
      for (const bool with_ids : {true, false}) {
        PrefillContext context(kContextLayers, /*max_tokens=*/90, recalling_config(), true);
        PrefillContext straight(kContextLayers, /*max_tokens=*/90, recalling_config(), true);
        if (past > 0) {
          prompt.run(context, 0, past);
          prompt.run(straight, 0, past);
        }
        const auto first = prompt.qkv[0].tokens(past, end),
                   second = prompt.qkv[1].tokens(past, end);
        if (with_ids) {
          context.begin(prompt.ids.slice(1, past, end));
        } else {
          context.begin(end - past);
        }
        context.attend(0, first.q, first.k, first.v);
        EXPECT_VALUE_ERROR(context.attend(0, first.q, first.k, first.v),
                           "a layer must attend once in a call, layer 0 has attended already: "
                           "begin() the next call");
        EXPECT_VALUE_ERROR_WITH(context.attend(1, second.q, second.k, second.v.slice(1, 0, 1)),
                                "value must have batch, heads and length of key");
        EXPECT_VALUE_ERROR(context.begin(prompt.ids.slice(1, 40, 41)),
                           "every layer must attend in a call, layer 0 has and others have not in "
                           "the last one: reset(), or truncate() to a checkpoint");
        EXPECT_EQ(context.checkpoint_before(past), past);
        context.truncate(past);
        EXPECT_TRUE(same(prompt.run(context, past, 90), prompt.run(straight, past, 90)));
        for (int64_t layer = 0; layer < kContextLayers; ++layer) {
          EXPECT_TRUE(same(context.tracker()->indices(layer), straight.tracker()->indices(layer)));
        }
      }
    }
  }
}

TEST(PrefillContext, ACallThatNoLayerAttendedInIsReplaced) {
  const LayeredPrompt prompt(60);
  auto context = new_context();
  prompt.run(context, 0, 60);
  context.begin(prompt.ids.slice(1, 0, 5));
  context.begin(3);
  EXPECT_VALUE_ERROR(context.begin(prompt.ids.slice(0, 0, 1)),
                     "max_tokens must be >= 120, the tokens after this call, got 90");
  EXPECT_VALUE_ERROR(context.begin(prompt.ids.slice(0, 0, 1).slice(1, 0, 7)),
                     "token_ids must have the batch size of the prompt (2), got 1");
  context.begin(prompt.ids.slice(1, 0, 7));
  EXPECT_TRUE(same(context.token_ids(), prompt.ids));
}

TEST(PrefillContext, FromTensorsRefusesWhatIsNoState) {
  const LayeredPrompt prompt(90);
  auto context = new_context();
  prompt.run(context, 0, 90);
  EXPECT_VALUE_ERROR_WITH(PrefillContext::from_tensors({}), "tensors must begin with an int64");
  auto tensors = context.state_tensors();
  tensors[2] = tensors[2].narrow(1, 0, 3);
  EXPECT_VALUE_ERROR_WITH(PrefillContext::from_tensors(tensors),
                          "tensors[2] must hold the ids of 2 rows and 90 tokens, got shape [2, 3]");
  tensors = context.state_tensors();
  tensors[1] = tensors[1].slice(0, 0, 1).expand({int64_t{1} << 33});
  EXPECT_VALUE_ERROR(PrefillContext::from_tensors(tensors),
                     "bytes of tensors[1] must be <= 4194304, got 8589934592");
  tensors = context.state_tensors();
  tensors[3] = tensors[3].slice(0, 0, 1).expand({int64_t{1} << 33});
  EXPECT_VALUE_ERROR_WITH(PrefillContext::from_tensors(tensors),
                          "tensors must begin with an int64");
  tensors = context.state_tensors();
  tensors.pop_back();
  EXPECT_VALUE_ERROR_WITH(PrefillContext::from_tensors(tensors), "tensors must hold all layers");
}

// A folder that is removed at the end, and a path in it.
struct SessionFile {
  SessionFile() {
    folder = std::filesystem::temp_directory_path() / ("h2o_session_" + std::to_string(getpid()));
    std::filesystem::create_directory(folder);
    path = folder / "text.session";
  }
  ~SessionFile() { std::filesystem::remove_all(folder); }

  std::string bytes() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder;
  std::filesystem::path path;
};

TEST(PrefillContext, ASessionFileGoesOnToTheBit) {
  const SessionFile file;
  const LayeredPrompt prompt(90);
  for (const bool with_ids : {true, false}) {
    auto context = new_context(), loaded = new_context();
    EXPECT_VALUE_ERROR_WITH(context.save(file.path, "model"), "length must be >= 1, got 0");
    prompt.run(context, 0, 50, with_ids);
    context.save(file.path, "model");
    const std::string bytes = file.bytes();
    prompt.run(loaded, 10, 40);
    loaded.load(file.path, "model");
    expect_same_state(loaded, context);
    loaded.save(file.path, "model");
    EXPECT_EQ(file.bytes(), bytes);
    EXPECT_TRUE(same(prompt.run(loaded, 50, 90), prompt.run(context, 50, 90)));
    expect_same_state(loaded, context);
  }
  // Nothing else is left in the folder.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(file.folder), {}), 1);
}

TEST(PrefillContext, WrongSessionsChangeNothing) {
  const SessionFile file;
  const LayeredPrompt prompt(90);
  auto context = new_context();
  prompt.run(context, 0, 50);
  context.save(file.path, "model");
  auto kept = new_context(), same_kept = new_context();
  prompt.run(kept, 0, 30);
  prompt.run(same_kept, 0, 30);
  EXPECT_VALUE_ERROR(kept.load(file.path, "other"), "session '" + file.path.string() +
                                                        "' cannot be read: session must be of the "
                                                        "model other, got one of model");
  PrefillConfig other = recalling_config();
  other.recall = 0;
  EXPECT_VALUE_ERROR_WITH(new_context(other).load(file.path, "model"),
                          "session must have the settings");
  EXPECT_VALUE_ERROR_WITH(PrefillContext(3, 90, recalling_config()).load(file.path, "model"),
                          "session must have 3 layers");
  EXPECT_VALUE_ERROR_WITH(PrefillContext(2, 49, recalling_config()).load(file.path, "model"),
                          "at most 49 tokens");
  const std::string missing = file.folder / "missing\n";
  try {
    kept.load(missing, "model");
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(error.what(), "[Errno 2] cannot read '" + file.folder.string() +
                                "/missing\\n': No such file or directory");
  }
  std::ofstream(missing) << "a text and nothing else";
  EXPECT_VALUE_ERROR(kept.load(missing, "model"),
                     "session '" + file.folder.string() +
                         "/missing\\n' cannot be read: it is no session file, or is damaged");
  expect_same_state(kept, same_kept);
  context.begin(prompt.ids.slice(1, 50, 60));
  const auto x = prompt.qkv[0].tokens(50, 60);
  context.attend(0, x.q, x.k, x.v);
  EXPECT_VALUE_ERROR_WITH(context.save(file.path, "model"),
                          "every layer must have attended in the last call");
  EXPECT_THROW(new_context().save(file.folder / "missing" / "x", "model"), std::exception);
}

TEST(PrefillContext, WorksInInferenceModeAndOutsideOfIt) {
  const LayeredPrompt prompt(70);
  auto context = new_context(), straight = new_context();
  {
    const c10::InferenceMode inference;
    prompt.run(context, 0, 40);
  }
  prompt.run(straight, 0, 40);
  EXPECT_TRUE(same(prompt.run(context, 40, 70), prompt.run(straight, 40, 70)));
}

TEST(PrefillContext, ContextsOnThreadsAreIndependent) {
  const LayeredPrompt prompt(90);
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

TEST(PrefillContext, DefaultsAndWrongArguments) {
  const LayeredPrompt prompt(40);
  EXPECT_EQ(PrefillContext(1, 8).config(), PrefillConfig::preset("recommended"));
  EXPECT_VALUE_ERROR(PrefillContext(2, 0), "max_tokens must be >= 1, got 0");
  EXPECT_VALUE_ERROR(PrefillContext(1, 8, PrefillConfig::parse("h2o,dense_layers=1")),
                     "dense_layers must name layers < 1, the layers of the context, got 1");
  PrefillContext context(kContextLayers, 50, recalling_config());
  const auto x = prompt.qkv[0];
  EXPECT_VALUE_ERROR(context.attend(0, x.q, x.k, x.v),
                     "begin() must be called before the layers of a call attend");
  EXPECT_VALUE_ERROR(context.begin(prompt.ids[0]),
                     "token_ids must have 2 dimensions, got shape [40]");
  EXPECT_VALUE_ERROR(context.begin(51),
                     "max_tokens must be >= 51, the tokens after this call, got 50");
  EXPECT_VALUE_ERROR(context.begin(1, -5), "total_tokens must be in [1, 50], got -5");
  EXPECT_VALUE_ERROR(context.begin(prompt.ids, 51), "total_tokens must be in [40, 50], got 51");
  context.begin(prompt.ids);
  EXPECT_VALUE_ERROR(context.attend(2, x.q, x.k, x.v), "layer must be in [0, 2), got 2");
  const auto other = x.tokens(0, 20);
  EXPECT_VALUE_ERROR(context.attend(0, other.q, other.k, other.v),
                     "query must have the tokens that the call began with (40), got shape [2, 4, "
                     "20, 8]");
  const auto row = [](const at::Tensor& t) { return t.slice(0, 0, 1); };
  EXPECT_VALUE_ERROR(context.attend(0, row(x.q), row(x.k), row(x.v)),
                     "query must have the batch size of the token ids (2), got shape [1, 4, 40, "
                     "8]");
  EXPECT_VALUE_ERROR(context.truncate(-1), "length must be >= 0, got -1");
}

}  // namespace
}  // namespace h2o_prefill::testing
