#include <ATen/Parallel.h>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

PrefillConfig settings(const std::string& changes = "recall=2") {
  return PrefillConfig::parse("h2o,chunk_size=8,recall_block=4").with(changes);
}

RecallLists call(const at::Tensor& tokens, const std::string& changes = "recall=2") {
  return lexical_recall(tokens, 0, settings(changes));
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
  const auto lists = call(tokens, "chunk_size=4,recall=1");
  EXPECT_TRUE(same(lists.offsets, ints({0, 0, 4})));
  // Token 5 recalls 0 and 1, token 6 also 2, token 7 also 3.
  EXPECT_TRUE(same(lists.positions, ints({0, 1, 2, 3})));
  EXPECT_TRUE(same(lists.visible_from, ints({5, 5, 6, 7})));
}

TEST(LexicalRecall, SameForAnyNumberOfThreads) {
  const auto tokens = at::randint(0, 6, {4, 60}, at::kLong);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = call(tokens);
  at::set_num_threads(4);
  const auto four = call(tokens);
  at::set_num_threads(threads);
  expect_equal(four, one);
}

TEST(LexicalRecall, NoTokens) {
  const auto lists = call(at::empty({1, 0}, at::kLong));
  EXPECT_TRUE(same(lists.offsets, ints({0})));
  EXPECT_EQ(lists.positions.numel(), 0);
}

TEST(LexicalRecall, WrongArguments) {
  const auto tokens = at::zeros({1, 10}, at::kLong);
  EXPECT_VALUE_ERROR_WITH(call(tokens[0]), "token_ids must have 2 dimensions");
  EXPECT_VALUE_ERROR_WITH(call(tokens.to(at::kInt)), "token_ids must be int64, got int32");
  EXPECT_VALUE_ERROR(lexical_recall(tokens, 11, settings()), "begin must be in [0, 10], got 11");
  EXPECT_VALUE_ERROR(call(tokens, "recall=0"), "recall must be >= 1, got 0");
  EXPECT_VALUE_ERROR(lexical_recall(tokens, 0, settings(), at::zeros({3}, at::kInt)),
                     "token_text must have 2 dimensions, got shape [3]");
}

}  // namespace
}  // namespace h2o_prefill::testing
