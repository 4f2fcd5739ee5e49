// Sessions of the package that H2O_TEST_PACKAGE names; test_packages.py exports it and runs these.
#include "h2o_prefill/crossover.h"
#include "h2o_prefill/package_session.h"
#include "testing.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <thread>

namespace h2o_prefill::testing {
namespace {

using Tokens = std::vector<int64_t>;

constexpr int64_t kPrompt = 150, kNew = 12;

std::string path_of(const char* variable) {
  const char* path = std::getenv(variable);
  return path ? path : "";
}

std::shared_ptr<const Package> load_package(int64_t concurrency) {
  return std::make_shared<const Package>(path_of("H2O_TEST_PACKAGE"), concurrency);
}

std::shared_ptr<const Package> package_of_tests() {
  static const auto package = load_package(1);
  return package;
}

// Words that come again, so that keys are recalled.
at::Tensor prompt_of(int64_t first) {
  return at::arange(first, first + 30).remainder(250).add(1).repeat({5}).unsqueeze(0);
}

Tokens answer_of(PackageSession& session, const at::Tensor& ids,
                 const GenerateOptions& options = {kNew}, Sampler sampler = Sampler()) {
  return session.generate(ids, options, sampler, {});
}

TEST(PackageSession, GeneratesWhatForwardSays) {
  PackageSession session(package_of_tests()), other(package_of_tests());
  const auto ids = prompt_of(3);
  std::vector<std::pair<int64_t, int64_t>> steps;
  Tokens seen;
  Sampler greedy;
  const Tokens answer = session.generate(
      ids,
      {.max_new_tokens = kNew,
       .on_progress = [&](int64_t done, int64_t total) { steps.emplace_back(done, total); }},
      greedy, [&](int64_t token) { return seen.push_back(token), true; });
  EXPECT_EQ(answer, seen);
  const std::vector<std::pair<int64_t, int64_t>> expected{
      {64, kPrompt}, {128, kPrompt}, {kPrompt, kPrompt}};
  EXPECT_EQ(steps, expected);

  auto logits = other.forward(ids);
  for (const int64_t token : answer) {
    EXPECT_EQ(logits.argmax(-1).item<int64_t>(), token);
    if (token != answer.back()) logits = other.forward(at::full({1, 1}, token, at::kLong));
  }
  EXPECT_EQ(session.length(), kPrompt + std::ssize(answer) - 1);
  EXPECT_TRUE(session.token_ids().narrow(1, 0, kPrompt).equal(ids));

  other.reset();
  const Tokens stopped = answer_of(
      other, ids, {.max_new_tokens = kNew, .stop_sequences = {{7, 9}, {answer[2], answer[3]}}});
  EXPECT_EQ(stopped, Tokens(answer.begin(), answer.begin() + 4));
}

TEST(PackageSession, DraftsChangeNoAnswer) {
  PackageSession session(package_of_tests());
  const auto ids = prompt_of(3);
  for (const SamplerOptions& options :
       {SamplerOptions{}, SamplerOptions{.penalty = 1.3}, SamplerOptions{.temperature = 1.0}}) {
    session.reset();
    const Tokens expected = answer_of(session, ids, {60}, Sampler(options));
    const auto text = session.token_ids().clone();
    for (const int64_t drafted : {1, 5, 40}) {
      session.reset();
      EXPECT_EQ(answer_of(session, ids, {.max_new_tokens = 60, .draft_tokens = drafted},
                          Sampler(options)),
                expected);
      EXPECT_TRUE(session.token_ids().equal(text));
    }
  }
  session.reset();
  EXPECT_REFUSED(answer_of(session, ids, {.draft_tokens = -1}), "draft_tokens must be >= 0");
}

TEST(PackageSession, GoesBackToItsCheckpoints) {
  const auto package = package_of_tests();
  PackageSession session(package, /*checkpoints=*/true), plain(package);
  const auto ids = prompt_of(3), rest = prompt_of(8).narrow(1, 0, 60);
  const auto next = [&](PackageSession& one) {
    return at::cat({one.forward(rest, Rows::kAll), one.forward(rest.narrow(1, 0, 1))});
  };
  answer_of(session, ids);  // calls end at 64, 128 and 150
  answer_of(plain, ids);
  EXPECT_EQ(session.checkpoint_before(155), 155);
  EXPECT_EQ(plain.checkpoint_before(155), 155);
  EXPECT_EQ(plain.checkpoint_before(149), 0);
  EXPECT_EQ(session.checkpoint_before(500), session.length());
  for (const int64_t length : {150, 128, 64}) {
    EXPECT_EQ(session.checkpoint_before(length + (length == 150 ? 0 : 20)), length);
    session.truncate(length);
    EXPECT_EQ(session.length(), length);
    EXPECT_EQ(session.checkpoint_before(length - 1), length == 150 ? 128 : length == 128 ? 64 : 0);
    PackageSession alone(package);
    alone.prefill(ids.narrow(1, 0, length));
    const auto branch = session.branch();
    EXPECT_TRUE(next(*branch).equal(next(alone)));
    EXPECT_EQ(branch->checkpoint_before(length + 10), length);
  }
  session.truncate(20);
  EXPECT_TRUE(session.token_ids().equal(ids.narrow(1, 0, 20)));
  next(session);
  session.truncate(0);
  EXPECT_EQ(session.length(), 0);
  EXPECT_REFUSED(session.truncate(-1), "length must be >= 0");
}

TEST(PackageSession, IsCancelled) {
  PackageSession session(package_of_tests());
  const auto ids = prompt_of(3);
  const Tokens expected = answer_of(session, ids);
  session.reset();
  EXPECT_THROW(session.prefill(
                   ids, [&](int64_t done, int64_t) { done < kPrompt ? session.cancel() : void(); }),
               Cancelled);
  EXPECT_EQ(session.length(), 64);

  session.reset();
  EXPECT_EQ(answer_of(session, ids), expected);
}

TEST(PackageSession, RunsOnThreadsOverOnePackage) {
  constexpr int kThreads = 4;
  const auto sampler_of = [](int i) {
    return Sampler({.temperature = 0.5 * i, .top_k = 20, .top_p = 0.9, .penalty = 1.2, .seed = 7});
  };
  std::vector<Tokens> expected, answers(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    PackageSession session(package_of_tests());
    session.forward(prompt_of(i).narrow(1, 0, 90));
    const auto rest = prompt_of(i).narrow(1, 90, kPrompt - 90);
    expected.push_back(answer_of(session, rest, {kNew}, sampler_of(i)));
  }
  for (const auto& package : {package_of_tests(), load_package(kThreads)}) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const std::string file = path_of("H2O_TEST_SESSION") + std::to_string(i);
        PackageSession session(package), loaded(package);
        session.forward(prompt_of(i).narrow(1, 0, 90));
        session.save(file);
        loaded.load(file);
        const auto rest = prompt_of(i).narrow(1, 90, kPrompt - 90);
        answers[i] = answer_of(*loaded.branch(), rest, {kNew}, sampler_of(i));
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(answers, expected);
  }
}

// Calls wait for each other, a fifth thread cancels them, and all write one file.
TEST(PackageSession, IsCancelledAndSavedOnThreads) {
  constexpr int kThreads = 4;
  const auto package = load_package(2);
  const std::string shared = path_of("H2O_TEST_SESSION") + ".shared";
  std::vector<std::unique_ptr<PackageSession>> sessions;
  for (int i = 0; i < kThreads; ++i) sessions.push_back(std::make_unique<PackageSession>(package));
  std::array<std::atomic<int64_t>, kThreads> seen{};
  std::atomic<int> running = kThreads;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      PackageSession& session = *sessions[i];
      const auto answer = [&] {
        while (true) {
          session.reset();
          answer_of(session, prompt_of(i),
                    {.max_new_tokens = kNew,
                     .on_progress = [&](int64_t done, int64_t) { seen[i] = done; }});
        }
      };
      EXPECT_THROW(answer(), Cancelled);
      session.reset();
      session.forward(prompt_of(i).narrow(1, 0, 90));
      const auto branch = session.branch();
      for (int round = 0; round < 3; ++round) {
        EXPECT_NO_THROW(session.save(shared));
        EXPECT_NO_THROW(branch->load(shared));
      }
      --running;
    });
  }
  while (running > 0) {
    for (int i = 0; i < kThreads; ++i) seen[i] > 0 ? sessions[i]->cancel() : void();
    std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(PackageSession, TakesTheMemoryOfItsStateAlone) {
  const auto resident = [] {
    int64_t whole, pages;
    std::ifstream("/proc/self/statm") >> whole >> pages;
    return pages * 4096;
  };
  answer_of(*std::make_unique<PackageSession>(package_of_tests()), prompt_of(3));
  std::vector<std::unique_ptr<PackageSession>> sessions;
  int64_t states = 0;
  const int64_t before = resident();
  for (int i = 0; i < 60; ++i) {
    sessions.push_back(std::make_unique<PackageSession>(package_of_tests()));
    answer_of(*sessions.back(), prompt_of(i));
    for (const at::Tensor& tensor : sessions.back()->state()) states += tensor.nbytes();
  }
  // The weights of the model are 0.4 MB, so sixty copies would be three times the states.
  EXPECT_LE(resident() - before, states + (4 << 20));
}
#endif

TEST(PackageSession, ChecksRowsAndStateBeforeItReadsThem) {
  const auto package = package_of_tests();
  PackageSession session(package);
  const auto ids = prompt_of(3).narrow(1, 0, 3);
  const auto rows = [](std::vector<int64_t> values) { return at::tensor(values, at::kLong); };
  constexpr int64_t kFar = int64_t{1} << 62;
  for (const int64_t row : {int64_t{5}, int64_t{3}, int64_t{-1}, int64_t{-4}, kFar, -kFar}) {
    EXPECT_REFUSED(session.forward(ids, rows({0, row})), "rows must be in [0, 3), got ");
  }
  for (const auto& [wrong, message] : std::vector<std::pair<at::Tensor, std::string>>{
           {rows({0}).to(at::kInt), "rows must be int64"},
           {rows({0}).unsqueeze(0), "rows must have 1 dimensions"},
           {rows({}), "number of rows must be >= 1"},
           {rows({0}).to_sparse(), "rows must be a strided tensor"},
           {rows({0}).to(at::kMeta), "rows must be on the CPU"},
           {at::Tensor(), "rows must be a tensor"}}) {
    EXPECT_REFUSED(session.forward(ids, wrong), message);
  }
  EXPECT_REFUSED(session.forward(ids.to(at::kMeta), rows({0})), "token_ids must be on the CPU");
  EXPECT_EQ(session.forward(ids, rows({2, 0, 2})).size(0), 3);

  const at::Tensor position = session.state()[1], before = position.clone();
  const std::string file = path_of("H2O_TEST_SESSION") + ".position";
  for (const std::vector<int64_t>& wrong : std::vector<std::vector<int64_t>>{
           {-1, 0}, {-kFar, 0}, {kFar, 0}, {257, 0}, {3, 4}, {3, -1}}) {
    position.copy_(rows(wrong));
    for (const std::function<void()>& call : std::vector<std::function<void()>>{
             [&] { session.forward(ids); }, [&] { session.length(); }, [&] { session.branch(); },
             [&] { session.save(file); }, [&] { answer_of(session, ids); }}) {
      EXPECT_REFUSED(call(), "0 <= begin <= tokens <= 256, got [");
    }
  }
  position.copy_(before);
  EXPECT_EQ(session.length(), 3);

  using State = std::vector<at::Tensor>;
  for (const auto& change : std::vector<std::function<void(State&)>>{
           [](State& state) { state.pop_back(); },
           [](State& state) { state[1] = state[1].to(at::kInt); },
           [](State& state) { state[2] = state[2].narrow(2, 0, 4); },
           [](State& state) { state[3] = state[3].transpose(1, 2).contiguous().transpose(1, 2); },
           [](State& state) { state[4] = at::Tensor(); },
       }) {
    auto state = package->new_state();
    change(state);
    EXPECT_REFUSED(package->run(ids, rows({0}), state), "state must have ");
  }
}

TEST(PackageSession, PromptsForWhichDenseAttentionIsFasterAreDense) {
  const auto package = package_of_tests();
  const PrefillConfig& settings = package->info().settings;
  PackageSession session(package);
  const at::Tensor key = session.state()[2], scores = session.state()[4];
  const int64_t shortest = shortest_sparse_prompt(settings, device_cost(key).sparse_product);
  ASSERT_TRUE(settings.is_auto());
  ASSERT_GT(shortest, settings.chunk_size + 1);
  ASSERT_LT(shortest, kPrompt);
  const auto ids = prompt_of(3);
  const auto logits = session.prefill(ids.narrow(1, 0, shortest - 1));
  EXPECT_FALSE(scores.any().item<bool>());
  PackageSession dense(package);
  EXPECT_TRUE(logits.equal(dense.forward_densely(ids.narrow(1, 0, shortest - 1))));
  session.prefill(ids.narrow(1, shortest - 1, 40));  // the prompt is long enough now
  EXPECT_TRUE(scores.any().item<bool>());
  PackageSession sparse(package);
  sparse.prefill(ids.narrow(1, 0, shortest));
  EXPECT_TRUE(sparse.state()[4].any().item<bool>());
}

TEST(PackageSession, SaysWhatIsWrong) {
  PackageSession session(package_of_tests());
  const auto ids = prompt_of(3);
  EXPECT_REFUSED(Package("/missing"), "there is no package /missing");
  EXPECT_REFUSED(load_package(0), "concurrency must be >= 1");
  EXPECT_REFUSED(session.forward(ids.to(at::kInt)), "token_ids must be int64");
  EXPECT_REFUSED(session.forward(ids.narrow(1, 0, 0)), "T >= 1");
  EXPECT_REFUSED(session.forward(ids - 100), "token ids must be in [0, ");
  EXPECT_REFUSED(session.forward(ids.repeat({1, 2})), "no room for 300 tokens after 0");
  EXPECT_REFUSED(answer_of(session, ids, {0}), "max_new_tokens must be >= 1");
  EXPECT_REFUSED(answer_of(session, ids, {500}), "the room after the prompt");
  EXPECT_EQ(session.length(), 0);
  EXPECT_REFUSED(Sampler({.temperature = -1}), "temperature must be >= 0");
  EXPECT_REFUSED(Sampler({.top_p = 0}), "top_p must be in (0, 1]");
  EXPECT_REFUSED(Sampler({.min_p = 2}), "min_p must be in [0, 1]");
  EXPECT_REFUSED(Sampler({.penalty = 0}), "penalty must be > 0");
  EXPECT_REFUSED(Sampler({.top_k = -1}), "top_k must be >= 0");
}

}  // namespace
}  // namespace h2o_prefill::testing
