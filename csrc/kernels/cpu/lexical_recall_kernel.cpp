#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/config_fields.h"
#include "common/prefill_request.h"

namespace h2o_prefill {
namespace {

// The runs of n tokens of one text, numbered: two positions have the same number if the same n
// tokens end there. Positions are linked to the one before with the same number, up to a limit that
// moves with the chunks.
class SuffixMatches {
 public:
  // numbers[p]: the run that ends at p, -1 where it would begin before the text.
  SuffixMatches(std::vector<int32_t> numbers, int32_t count)
      : numbers_(std::move(numbers)), earlier_(numbers_.size()), latest_(count, -1) {}

  // Makes the positions [published, end) known to latest().
  void publish(int64_t end) {
    for (; published_ < end; ++published_) {
      const int32_t number = numbers_[published_];
      if (number < 0) continue;
      earlier_[published_] = latest_[number];
      latest_[number] = static_cast<int32_t>(published_);
    }
  }

  // Calls with(end) for the latest published positions where the run that ends at p ended, the
  // last one first.
  template <typename With>
  void for_latest(int64_t p, int64_t most, const With& with) const {
    int32_t end = numbers_[p] < 0 ? -1 : latest_[numbers_[p]];
    for (int64_t i = 0; i < most && end >= 0; ++i, end = earlier_[end]) with(end);
  }

  const std::vector<int32_t>& numbers() const { return numbers_; }

 private:
  std::vector<int32_t> numbers_;
  std::vector<int32_t> earlier_;
  std::vector<int32_t> latest_;
  int64_t published_ = 0;
};

// Gives distinct keys the numbers 0, 1, ... in the order of their first appearance. Open addressing
// in one array, at most half full: half of the search is spent here.
class Numbering {
 public:
  explicit Numbering(int64_t max_keys)
      : slots_(std::bit_ceil(static_cast<uint64_t>(2 * max_keys) | 2)),
        shift_(64 - std::countr_zero(slots_.size())) {}

  int32_t number(int64_t key) {
    // Multiplicative hashing: the high bits of key times 2^64 / golden ratio.
    uint64_t i = (static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15U) >> shift_;
    while (slots_[i].number >= 0 && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
    if (slots_[i].number < 0) slots_[i] = {key, count_++};
    return slots_[i].number;
  }
  int32_t count() const { return count_; }

 private:
  struct Slot {
    int64_t key = 0;
    int32_t number = -1;
  };
  std::vector<Slot> slots_;
  int shift_;
  int32_t count_ = 0;
};

// Numbers the runs of every length from 1 to max_suffix: a run of n is one of n - 1 and a token
// after it.
std::vector<SuffixMatches> number_suffixes(const int64_t* tokens, int64_t length,
                                           int64_t max_suffix) {
  std::vector<SuffixMatches> by_length;
  std::vector<int32_t> words(length);
  std::vector<int32_t> numbers(length);
  for (int64_t n = 1; n <= max_suffix; ++n) {
    Numbering known(length);
    std::vector<int32_t> longer(length, -1);
    for (int64_t p = n - 1; p < length; ++p) {
      const int64_t key =
          n == 1 ? tokens[p] : (static_cast<int64_t>(numbers[p - 1]) << 32) | words[p];
      longer[p] = known.number(key);
    }
    numbers = longer;
    if (n == 1) words = longer;
    by_length.emplace_back(std::move(longer), known.count());
  }
  return by_length;
}

// The text of the tokens as one sequence of characters, and the runs of n characters in it.
class Characters {
 public:
  // table [vocabulary, width]: the characters of each token, then 0. Other ids have none.
  Characters(const int64_t* tokens, int64_t length, const int32_t* table, int64_t vocabulary,
             int64_t width, int64_t n)
      : ends_(length) {
    std::vector<int32_t> text;
    for (int64_t p = 0; p < length; ++p) {
      const bool known = tokens[p] >= 0 && tokens[p] < vocabulary;
      const int32_t* const first = known ? table + tokens[p] * width : nullptr;
      for (int64_t i = 0; known && i < width && first[i] != 0; ++i) {
        text.push_back(first[i]);
        owners_.push_back(static_cast<int32_t>(p));
      }
      ends_[p] = static_cast<int32_t>(text.size());
    }
    matches_.emplace(number_runs(text, n));
  }

  // Makes the text of the tokens before `end` known to for_latest().
  void publish(int64_t end) { matches_->publish(end > 0 ? ends_[end - 1] : 0); }

  // Calls with(t) for the token that holds the character after each of the latest earlier matches
  // of the characters that end with token p.
  template <typename With>
  void for_latest(int64_t p, int64_t most, const With& with) const {
    const int64_t end = ends_[p];
    if (end == (p > 0 ? ends_[p - 1] : 0)) return;  // a token without text
    matches_->for_latest(end - 1, most, [&](int64_t match) { with(owners_[match + 1]); });
  }

 private:
  // A rolling hash stands for a run: two runs that share one recall a key too many.
  static SuffixMatches number_runs(const std::vector<int32_t>& text, int64_t n) {
    constexpr uint64_t kBase = 0x9E3779B97F4A7C15U;
    uint64_t leaving = 1;  // kBase^n
    for (int64_t i = 0; i < n; ++i) leaving *= kBase;
    const auto length = static_cast<int64_t>(text.size());
    Numbering known(length);
    std::vector<int32_t> numbers(length, -1);
    uint64_t hash = 0;
    for (int64_t i = 0; i < length; ++i) {
      hash = hash * kBase + static_cast<uint64_t>(text[i]);
      if (i >= n) hash -= leaving * static_cast<uint64_t>(text[i - n]);
      // The low bits of a product depend on the low bits of its factors alone.
      if (i >= n - 1) numbers[i] = known.number(static_cast<int64_t>(hash ^ (hash >> 32U)));
    }
    return {std::move(numbers), known.count()};
  }

  std::vector<int32_t> ends_;    // of each token: the characters up to its last
  std::vector<int32_t> owners_;  // of each character
  std::optional<SuffixMatches> matches_;
};

// Keys recalled for the latest match of a token's characters.
constexpr int64_t kCharacterSpan = 32;

// Keys that the blocks of a call list, of all rows of a batch: 512 MiB.
constexpr int64_t kMostEntries = int64_t{1} << 26;

void check_entries(int64_t entries) {
  TORCH_CHECK_VALUE(entries <= kMostEntries, "recall must list at most ", kMostEntries,
                    " keys for the blocks of a call, got more: reduce recall, or make chunk_size a "
                    "multiple of 64");
}

// The positions that a block lists. Those that it has listed already are passed over in nearly one
// step, however many they are: each points to one after it that it may not have listed.
class Listed {
 public:
  explicit Listed(int64_t length) : block_(length + 1, -1), next_(length + 1) {}

  // Calls with(position) for each position in [first, end) that the block has not listed yet.
  template <typename With>
  void add(int32_t block, int32_t first, int32_t end, const With& with) {
    for (int32_t p = skip(block, first); p < end; p = skip(block, p + 1)) {
      block_[p] = block;
      next_[p] = end;  // up to which all are listed in the end
      with(p);
    }
  }

 private:
  int32_t skip(int32_t block, int32_t p) {
    while (block_[p] == block) {
      const int32_t next = next_[p];
      if (block_[next] == block) next_[p] = next_[next];
      p = next;
    }
    return p;
  }

  std::vector<int32_t> block_;  // the last one that has listed a position
  std::vector<int32_t> next_;   // of a position that `block_` has listed
};

struct Recalled {
  std::vector<int32_t> counts;  // a block
  std::vector<int32_t> positions;
  std::vector<int32_t> visible_from;
};

Recalled recall_row(const int64_t* tokens, int64_t length, const at::Tensor& token_text,
                    int64_t begin, const PrefillConfig& s) {
  auto suffixes = number_suffixes(tokens, length, kRecallSuffix);
  const auto& words = suffixes.front().numbers();
  std::vector<int32_t> counts(length ? *std::max_element(words.begin(), words.end()) + 1 : 0);
  for (int64_t p = 0; p < begin; ++p) ++counts[words[p]];

  std::optional<Characters> characters;
  if (s.recall_characters > 0 && token_text.defined()) {
    characters.emplace(tokens, length, token_text.const_data_ptr<int32_t>(), token_text.size(0),
                       token_text.size(1), s.recall_characters);
  }

  const int64_t rows_of_block = s.recall_block();
  Recalled recalled;
  Listed listed(length);
  std::vector<std::pair<int32_t, int32_t>> spans;  // first positions, and the ends
  for (int64_t p = begin; p < length; ++p) {
    const int64_t row = p - begin;
    const int64_t block = row / rows_of_block;
    const int64_t chunk_begin = p - row % s.chunk_size;
    if (row % rows_of_block == 0) recalled.counts.push_back(0);
    if (row % s.chunk_size == 0) {
      for (auto& matches : suffixes) matches.publish(chunk_begin);
      if (characters) characters->publish(chunk_begin);
    }
    ++counts[words[p]];
    spans.clear();
    const auto find = [&](int64_t first, int64_t span) {
      const int64_t end = std::min(first + span, chunk_begin);
      if (first < end) spans.emplace_back(first, end);
    };
    for (int64_t n = kRecallSuffix; n >= 1 && spans.empty(); --n) {
      if (n == 1 && counts[words[p]] > kRecallMaxCount) break;
      suffixes[n - 1].for_latest(p, s.recall, [&](int64_t end) { find(end, kRecallSpan); });
    }
    if (characters) {
      characters->for_latest(p, 1, [&](int64_t next) { find(next, kCharacterSpan); });
    }
    // Sorted by first position, so that new positions come in order. Matches come last first.
    std::reverse(spans.begin(), spans.end());
    if (!std::is_sorted(spans.begin(), spans.end())) std::sort(spans.begin(), spans.end());
    for (const auto& [first, end] : spans) {
      listed.add(static_cast<int32_t>(block), first, end, [&](int32_t position) {
        recalled.positions.push_back(position);
        recalled.visible_from.push_back(static_cast<int32_t>(p));
        ++recalled.counts.back();
      });
    }
    check_entries(std::ssize(recalled.positions));
  }
  return recalled;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lexical_recall_cpu(
    const at::Tensor& token_ids_argument, int64_t begin, std::string_view settings,
    const std::optional<at::Tensor>& token_text_argument) {
  const auto config = read_settings(settings);
  check_lexical_recall(token_ids_argument, begin, *config, token_text_argument);
  const auto token_ids = token_ids_argument.contiguous();
  const auto token_text = token_text_argument ? token_text_argument->contiguous() : at::Tensor();
  const int64_t batch = token_ids.size(0);
  const int64_t length = token_ids.size(1);
  std::vector<Recalled> rows(batch);
  at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      rows[b] = recall_row(token_ids.const_data_ptr<int64_t>() + b * length, length, token_text,
                           begin, *config);
    }
  });

  int64_t entries = 0;
  for (const Recalled& row : rows) entries += std::ssize(row.positions);
  check_entries(entries);
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> positions;
  std::vector<int32_t> visible_from;
  for (const Recalled& row : rows) {
    for (const int32_t count : row.counts) offsets.push_back(offsets.back() + count);
    positions.insert(positions.end(), row.positions.begin(), row.positions.end());
    visible_from.insert(visible_from.end(), row.visible_from.begin(), row.visible_from.end());
  }
  return {at::tensor(offsets, at::kInt), at::tensor(positions, at::kInt),
          at::tensor(visible_from, at::kInt)};
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("lexical_recall", &lexical_recall_cpu); }

}  // namespace
}  // namespace h2o_prefill
