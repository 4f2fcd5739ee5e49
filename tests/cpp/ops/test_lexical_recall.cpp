#include <ATen/Parallel.h>

#include <map>
#include <set>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill {
namespace {

using testing::same;

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

// Positions before `limit` where the n tokens that end at p also end, latest first.
std::vector<int64_t> earlier_matches(const std::vector<int64_t>& tokens, int64_t p, int64_t n,
                                     int64_t limit) {
  std::vector<int64_t> matches;
  if (p + 1 < n) return matches;
  for (int64_t e = limit - 1; e >= n - 1; --e) {
    if (std::equal(tokens.begin() + (e - n + 1), tokens.begin() + (e + 1),
                   tokens.begin() + (p - n + 1)))
      matches.push_back(e);
  }
  return matches;
}

// The definition, word by word.
RecallLists expected_lists(const at::Tensor& token_ids, const Settings& s) {
  std::vector<int32_t> offsets{0}, positions, visible_from;
  for (int64_t b = 0; b < token_ids.size(0); ++b) {
    const auto row = token_ids[b].contiguous();
    const std::vector<int64_t> tokens(row.const_data_ptr<int64_t>(),
                                      row.const_data_ptr<int64_t>() + row.numel());
    const int64_t length = row.numel();
    for (int64_t block = s.begin; block < length; block += s.block) {
      std::map<int64_t, int64_t> first_seen;
      for (int64_t p = block; p < std::min(block + s.block, length); ++p) {
        const int64_t chunk = s.begin + (p - s.begin) / s.chunk_size * s.chunk_size;
        for (int64_t n = s.max_suffix; n >= 1; --n) {
          if (n == 1 && std::count(tokens.begin(), tokens.begin() + p + 1, tokens[p]) > s.max_count)
            continue;
          auto matches = earlier_matches(tokens, p, n, chunk);
          if (matches.empty()) continue;
          matches.resize(std::min<size_t>(matches.size(), s.max_matches));
          for (const int64_t e : matches) {
            for (int64_t j = e; j < std::min(e + s.span, chunk); ++j) first_seen.try_emplace(j, p);
          }
          break;
        }
      }
      std::set<std::pair<int64_t, int64_t>> sorted;  // by visible_from, then position
      for (const auto& [position, p] : first_seen) sorted.emplace(p, position);
      for (const auto& [p, position] : sorted) {
        positions.push_back(static_cast<int32_t>(position));
        visible_from.push_back(static_cast<int32_t>(p));
      }
      offsets.push_back(static_cast<int32_t>(positions.size()));
    }
  }
  return {at::tensor(offsets, at::kInt), at::tensor(positions, at::kInt),
          at::tensor(visible_from, at::kInt)};
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

TEST(LexicalRecall, EqualsItsDefinition) {
  for (const int64_t vocabulary : {2, 5, 30}) {
    at::manual_seed(vocabulary);
    const auto tokens = at::randint(0, vocabulary, {2, 70}, at::kLong);
    for (const Settings& settings :
         {Settings{}, Settings{.begin = 21}, Settings{.max_matches = 1, .span = 1},
          Settings{.max_suffix = 1}, Settings{.max_suffix = 5, .span = 4}, Settings{.max_count = 2},
          Settings{.chunk_size = 32, .block = 32}, Settings{.begin = 70},
          Settings{.chunk_size = 100, .block = 4}}) {
      expect_equal(call(tokens, settings), expected_lists(tokens, settings));
    }
  }
}

TEST(LexicalRecall, DependsOnNoLaterToken) {
  at::manual_seed(1);
  const auto tokens = at::randint(0, 4, {1, 40}, at::kLong);
  const auto all = call(tokens, {}), prefix = call(tokens.slice(1, 0, 28), {});
  EXPECT_TRUE(same(all.offsets.slice(0, 0, prefix.offsets.size(0)), prefix.offsets));
  const auto known = prefix.positions.size(0);
  EXPECT_TRUE(same(all.positions.slice(0, 0, known), prefix.positions));
  EXPECT_TRUE(same(all.visible_from.slice(0, 0, known), prefix.visible_from));
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
  EXPECT_VALUE_ERROR(call(tokens, {.chunk_size = 0}), "chunk_size must be >= 1, got 0");
  EXPECT_VALUE_ERROR(call(tokens, {.block = 0}), "block must be >= 1, got 0");
  EXPECT_VALUE_ERROR(call(tokens, {.max_matches = 0}), "max_matches must be >= 1, got 0");
  EXPECT_VALUE_ERROR(call(tokens, {.max_suffix = 0}), "max_suffix must be >= 1, got 0");
  EXPECT_VALUE_ERROR(call(tokens, {.span = 0}), "span must be >= 1, got 0");
  EXPECT_VALUE_ERROR(call(tokens, {.max_count = 0}), "max_count must be >= 1, got 0");
}

}  // namespace
}  // namespace h2o_prefill
