#include <ATen/Parallel.h>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

struct Settings {
  int64_t begin = 0;
  int64_t chunk_size = 8;
  int64_t block = 4;
  int64_t max_matches = 2;
  int64_t max_suffix = 3;
  int64_t span = 2;
  int64_t max_count = 16;
};

RecallLists call(const at::Tensor& tokens, const Settings& s) {
  return lexical_recall(tokens, s.begin, s.chunk_size, s.block, s.max_matches, s.max_suffix, s.span,
                        s.max_count);
}

void expect_equal(const RecallLists& got, const RecallLists& expected) {
  EXPECT_TRUE(same(got.offsets, expected.offsets));
  EXPECT_TRUE(same(got.positions, expected.positions));
  EXPECT_TRUE(same(got.visible_from, expected.visible_from));
}

at::Tensor ints(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

TEST(LexicalRecall, WorkedExample) {
  // "1 2 3" stands at 0..2, and again at 5..7 of the second chunk, which begins at 4.
  const auto tokens = at::tensor(std::vector<int64_t>{1, 2, 3, 9, 8, 1, 2, 3}).view({1, 8});
  const auto lists = call(tokens, {.chunk_size = 4, .block = 4, .max_matches = 1});
  EXPECT_TRUE(same(lists.offsets, ints({0, 0, 4})));
  // Token 5 recalls 0 and 1, token 6 also 2, token 7 also 3.
  EXPECT_TRUE(same(lists.positions, ints({0, 1, 2, 3})));
  EXPECT_TRUE(same(lists.visible_from, ints({5, 5, 6, 7})));
}

TEST(LexicalRecall, SameForAnyNumberOfThreads) {
  const auto tokens = at::randint(0, 6, {4, 60}, at::kLong);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = call(tokens, {});
  at::set_num_threads(4);
  const auto four = call(tokens, {});
  at::set_num_threads(threads);
  expect_equal(four, one);
}

TEST(LexicalRecall, NoTokens) {
  const auto lists = call(at::empty({1, 0}, at::kLong), {});
  EXPECT_TRUE(same(lists.offsets, ints({0})));
  EXPECT_EQ(lists.positions.numel(), 0);
}

TEST(LexicalRecall, WrongArguments) {
  const auto tokens = at::zeros({1, 10}, at::kLong);
  EXPECT_VALUE_ERROR_WITH(call(tokens[0], {}), "token_ids must have 2 dimensions");
  EXPECT_VALUE_ERROR_WITH(call(tokens.to(at::kInt), {}), "token_ids must be int64, got int32");
  EXPECT_VALUE_ERROR(call(tokens, {.begin = 11}), "begin must be in [0, 10], got 11");
  EXPECT_VALUE_ERROR(call(tokens, {.chunk_size = 10}),
                     "chunk_size must be a multiple of block, got 10 and 4");
  EXPECT_VALUE_ERROR(call(tokens, {.span = 0}), "span must be >= 1, got 0");
}

}  // namespace
}  // namespace h2o_prefill::testing
