#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "common/checks.h"

namespace h2o_prefill {
namespace {

struct RecallSettings {
  int64_t begin;
  int64_t chunk_size;
  int64_t block;
  int64_t max_matches;
  int64_t max_suffix;
  int64_t span;
  int64_t max_count;
};

// The runs of n tokens of one text, numbered: two positions have the same number if the same n
// tokens end there. Positions are linked to the one before with the same number, up to a limit that
// moves with the chunks.
class SuffixPlaces {
 public:
  // numbers[p]: the run that ends at p, -1 where it would begin before the text.
  explicit SuffixPlaces(std::vector<int32_t> numbers, int32_t count)
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

  // The latest published place where the run that ends at p ended, -1 if none; earlier() goes on
  // from there.
  int32_t latest(int64_t p) const { return numbers_[p] < 0 ? -1 : latest_[numbers_[p]]; }
  int32_t earlier(int32_t place) const { return earlier_[place]; }

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
std::vector<SuffixPlaces> number_suffixes(const int64_t* tokens, int64_t length,
                                          int64_t max_suffix) {
  std::vector<SuffixPlaces> by_length;
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

struct Recalled {
  std::vector<int32_t> counts;  // a block
  std::vector<int32_t> positions;
  std::vector<int32_t> visible_from;
};

Recalled recall_row(const int64_t* tokens, int64_t length, const RecallSettings& s) {
  auto suffixes = number_suffixes(tokens, length, s.max_suffix);
  const auto& words = suffixes.front().numbers();
  std::vector<int32_t> occurrences(length ? *std::max_element(words.begin(), words.end()) + 1 : 0);
  for (int64_t p = 0; p < s.begin; ++p) ++occurrences[words[p]];

  Recalled recalled;
  std::vector<int64_t> listed(length, -1);  // the last block that lists a position
  std::vector<int32_t> found;
  for (int64_t p = s.begin; p < length; ++p) {
    const int64_t row = p - s.begin;
    const int64_t block = row / s.block;
    const int64_t chunk_begin = p - row % s.chunk_size;
    if (row % s.block == 0) recalled.counts.push_back(0);
    if (row % s.chunk_size == 0) {
      for (auto& places : suffixes) places.publish(chunk_begin);
    }
    ++occurrences[words[p]];
    found.clear();
    for (int64_t n = s.max_suffix; n >= 1 && found.empty(); --n) {
      if (n == 1 && occurrences[words[p]] > s.max_count) break;
      const SuffixPlaces& places = suffixes[n - 1];
      int32_t place = places.latest(p);
      for (int64_t i = 0; i < s.max_matches && place >= 0; ++i, place = places.earlier(place)) {
        for (int64_t position = place; position < std::min(place + s.span, chunk_begin);
             ++position) {
          found.push_back(static_cast<int32_t>(position));
        }
      }
    }
    std::sort(found.begin(), found.end());
    for (const int32_t position : found) {
      if (listed[position] == block) continue;
      listed[position] = block;
      recalled.positions.push_back(position);
      recalled.visible_from.push_back(static_cast<int32_t>(p));
      ++recalled.counts.back();
    }
  }
  return recalled;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lexical_recall_cpu(
    const at::Tensor& token_ids_argument, int64_t begin, int64_t chunk_size, int64_t block,
    int64_t max_matches, int64_t max_suffix, int64_t span, int64_t max_count) {
  check_lexical_recall(token_ids_argument, begin, chunk_size, block, max_matches, max_suffix, span,
                       max_count);
  const auto token_ids = token_ids_argument.contiguous();
  const int64_t batch = token_ids.size(0);
  const int64_t length = token_ids.size(1);
  std::vector<Recalled> rows(batch);
  at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      rows[b] = recall_row(token_ids.const_data_ptr<int64_t>() + b * length, length,
                           {begin, chunk_size, block, max_matches, max_suffix, span, max_count});
    }
  });

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
