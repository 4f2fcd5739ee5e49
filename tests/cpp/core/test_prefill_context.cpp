// What Python does not see of `PrefillContext`; tests/python/core/test_prefill_context.py has the
// rest.
#include "h2o_prefill/prefill_context.h"

#include <thread>
#include <type_traits>

#include "h2o_prefill/package_session.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

// A copy would change with the original.
template <typename T>
constexpr bool kHasNoCopies = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kHasNoCopies<PrefillContext> && kHasNoCopies<ChunkedKVCache> &&
              kHasNoCopies<MemorySetTracker> && kHasNoCopies<Sampler> &&
              kHasNoCopies<PackageSession> && kHasNoCopies<Answer>);

TEST(PrefillContext, SettingsAreTheDefault) {
  EXPECT_EQ(PrefillContext(1, 8).config(), PrefillConfig::preset("recommended"));
}

TEST(PrefillContext, ContextsOnThreadsAreIndependent) {
  const auto [q, k, v] = random_qkv(90);
  const at::Tensor ids = at::arange(90).remainder(11).expand({2, 90});
  const auto run = [&](int64_t min_prefill) {
    // Settings that no thread has read before.
    PrefillContext context(
        1, 90,
        PrefillConfig::parse("recommended,chunk_size=16,local_window=3,"
                             "heavy_budget=4,recall=2,error_rows=4,min_prefill=" +
                             std::to_string(min_prefill)));
    at::Tensor out;
    for (int round = 0; round < 5; ++round) {
      context.reset();
      context.begin(ids);
      out = context.attend(0, q, k, v);
    }
    return out;
  };
  const at::Tensor expected = run(9);
  std::vector<at::Tensor> outs(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < outs.size(); ++i) {
    threads.emplace_back([&, i] { outs[i] = run(10 + static_cast<int64_t>(i)); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& out : outs) EXPECT_TRUE(same(out, expected));
}

}  // namespace
}  // namespace h2o_prefill::testing
