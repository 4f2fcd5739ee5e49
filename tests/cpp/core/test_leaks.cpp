// Prompts leave no memory allocated: the bytes that malloc has handed out and the resident set are
// the same after 50 prompts of random lengths and after 1,000, within the bounds below.
//
// GLIBC_TUNABLES=glibc.malloc.tcache_count=0, which ctest sets, keeps freed blocks from counting as
// handed out.
#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>

#include "h2o_prefill/ops.h"
#include "h2o_prefill/prefill_context.h"
#include "testing.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace h2o_prefill::testing {
namespace {

constexpr int kPrompts = 1000;
constexpr int kFirstReading = 50;
// The most growth between the two: the texts of settings that are kept come and go. One tensor lost
// with every prompt takes 950 times 300 bytes or more.
constexpr int64_t kAllocatedBound = 100 << 10;
// Fragments of the heap count here; the state of one layer lost with every prompt takes 5 MB.
constexpr int64_t kResidentBound = 2 << 20;

constexpr int64_t kLeakLayers = 2;
constexpr int64_t kLongest = 300;
constexpr int64_t kWarmUpStep = 3;

struct Held {
  int64_t allocated;  // bytes that malloc has handed out and not got back
  int64_t resident;   // bytes of the process in memory
};

Held held() {
  const auto info = mallinfo2();
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return {.allocated = static_cast<int64_t>(info.uordblks + info.hblkhd),
          .resident = pages * sysconf(_SC_PAGESIZE)};
}

PrefillConfig every_setting() {
  return PrefillConfig::parse(
      "recommended,chunk_size=32,local_window=6,heavy_budget=6,recall=2,recall_block=16,"
      "wide=1x2+1.0x4,error_rows=2");
}

bool counts_freed_blocks() {
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  return tunables == nullptr || std::string(tunables).find("tcache_count=0") == std::string::npos;
}

// Runs prompts of random lengths and compares the held memory after some and after all of them.
void expect_nothing_stays(const std::function<void(int64_t length)>& run) {
  if (counts_freed_blocks()) GTEST_SKIP() << "needs GLIBC_TUNABLES=glibc.malloc.tcache_count=0";
  std::mt19937 random(7);
  std::uniform_int_distribution<int64_t> lengths(1, kLongest);
  // Each kind of call once; and more prompts than texts of settings are kept.
  for (int64_t length = kLongest; length > 0; length -= kWarmUpStep) run(length);
  run(1);
  for (int i = 0; i < kFirstReading; ++i) run(lengths(random));
  const Held first = held();
  for (int i = kFirstReading; i < kPrompts; ++i) run(lengths(random));
  const Held last = held();
  EXPECT_LE(last.allocated - first.allocated, kAllocatedBound);
  EXPECT_LE(last.resident - first.resident, kResidentBound);
}

TEST(Leaks, TheOperatorWithSettingsThatItHasNotSeen) {
  const auto x = random_qkv(kLongest);
  int64_t texts = 0;
  expect_nothing_stays([&](int64_t length) {
    const auto call = x.call(0, length);
    const auto settings = "h2o,chunk_size=32,local_window=6,heavy_budget=6,recall_max_count=" +
                          std::to_string(++texts);
    prefill_attention(call.q, call.k, call.v, {}, /*layer=*/0, settings);
  });
}

// Prefill in two calls and decoding, of a new context or one that is reset.
void run_prompt(PrefillContext& context, const at::Tensor& ids, const Qkv& x, int64_t length) {
  int64_t begin = 0;
  for (const int64_t end : {length - length / 3, length, length + 1, length + 2}) {
    context.begin(ids.slice(1, begin, end));
    const auto call = x.tokens(begin, end);
    for (int64_t layer = 0; layer < kLeakLayers; ++layer) {
      context.attend(layer, call.q, call.k, call.v);
    }
    begin = end;
  }
}

class ContextLeaks : public ::testing::Test {
 protected:
  static constexpr int64_t kRoom = kLongest + 2;

  const Qkv x_ = random_qkv(kRoom);
  const at::Tensor ids_ = at::arange(kRoom).remainder(23).expand({2, kRoom});
};

TEST_F(ContextLeaks, AContextForEveryPrompt) {
  expect_nothing_stays([&](int64_t length) {
    PrefillContext context(kLeakLayers, kRoom, every_setting());
    run_prompt(context, ids_, x_, length);
  });
}

TEST_F(ContextLeaks, OneContextThatIsReset) {
  PrefillContext context(kLeakLayers, kRoom, every_setting());
  expect_nothing_stays([&](int64_t length) {
    context.reset();
    run_prompt(context, ids_, x_, length);
  });
}

// The measure sees a leak.
TEST(Leaks, AStateThatStaysIsFound) {
  const Held before = held();
  std::vector<at::Tensor> kept;
  for (int i = kFirstReading; i < kPrompts; ++i) kept.push_back(at::empty({1}, at::kInt));
  EXPECT_GT(held().allocated - before.allocated, kAllocatedBound);
}

}  // namespace
}  // namespace h2o_prefill::testing

#else

// Sanitizers have an allocator of their own; LeakSanitizer looks at every test.
TEST(Leaks, AreForTheGnuCLibrary) { GTEST_SKIP() << "needs malloc of the GNU C library"; }
TEST(ContextLeaks, AreForTheGnuCLibrary) { GTEST_SKIP() << "needs malloc of the GNU C library"; }

#endif
