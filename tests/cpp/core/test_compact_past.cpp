#include "h2o_prefill/compact_past.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

PrefillConfig settings(int64_t recall) {
  return {.chunk_size = 16,
          .local_window = 6,
          .heavy_budget = 5,
          .sink_tokens = 2,
          .wide_heads = {{0, 1, 2}},
          .recall = recall,
          .recall_block = 8};
}

// A range [begin, end) of a call attends after what it can see of the past.
class Ranges {
 public:
  Ranges(int64_t length, const PrefillConfig& config)
      : x_(random_qkv(length)),
        ids_(at::arange(length).remainder(23).repeat({2, 1})),
        config_(config.of_layer(0)) {}

  RecallLists lists(int64_t begin, int64_t end) const {
    if (config_.recall == 0) return {};
    return lexical_recall(ids_.narrow(1, 0, end), begin, config_);
  }

  std::tuple<at::Tensor, LayerState> in_one_call() const {
    const int64_t length = x_.q.size(2);
    return chunked_sparse_attention(x_.q, x_.k, x_.v, {}, config_, lists(0, length));
  }

  CompactPast past_of(int64_t begin, int64_t end, const std::optional<MemoryRows>& memory) const {
    const auto recalled = lists(begin, end).positions;
    auto needed = at::empty({0}, at::kLong);
    if (recalled.defined()) {
      needed = std::get<0>(at::_unique(recalled.masked_select(recalled < begin))).to(at::kLong);
    }
    return {begin,       needed, x_.k.index_select(2, needed), x_.v.index_select(2, needed),
            end - begin, memory};
  }

  std::tuple<at::Tensor, LayerState, MemoryRows> attend(CompactPast& past, int64_t begin,
                                                        int64_t end) const {
    const auto own = x_.tokens(begin, end);
    const int64_t half = (end - begin) / 2;
    past.append(own.k.narrow(2, 0, half), own.v.narrow(2, 0, half));
    const auto [k, v] = past.append(own.k.narrow(2, half, end - begin - half),
                                    own.v.narrow(2, half, end - begin - half));
    const auto [out, state] = chunked_sparse_attention(own.q, k, v, past.state(), config_,
                                                       past.recall_lists(lists(begin, end)));
    return {out, state, past.memory_rows(state, k, v, config_)};
  }

 private:
  Qkv x_;
  at::Tensor ids_;
  PrefillConfig config_;
};

TEST(CompactPast, RangesEqualOneCallToTheBit) {
  for (const int64_t recall : {0, 3}) {
    const Ranges ranges(71, settings(recall));
    const auto [expected, last] = ranges.in_one_call();
    std::optional<MemoryRows> memory;
    const std::vector<int64_t> bounds{0, 16, 48, 71};
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      const int64_t begin = bounds[i], end = bounds[i + 1];
      CompactPast past = ranges.past_of(begin, end, memory);
      EXPECT_LT(past.table().size(0), begin + 1);
      const auto [out, state, next] = ranges.attend(past, begin, end);
      EXPECT_TRUE(same(out, expected.narrow(2, begin, end - begin)));
      memory = next;
      if (end < bounds.back()) continue;
      const LayerState whole = past.whole_state(state);
      EXPECT_TRUE(same(whole.memory, last.memory));
      EXPECT_EQ(whole.last_chunk_begin, last.last_chunk_begin);
      const auto members = last.memory.clamp_min(0).to(at::kLong);
      EXPECT_TRUE(same(whole.scores.gather(2, members), last.scores.gather(2, members)));
    }
  }
}

TEST(CompactPast, RefusesWhatDoesNotBelong) {
  const auto rows = at::zeros({1, 2, 1, 8});
  const auto at = [](int64_t position) { return at::full({1}, position, at::kLong); };
  EXPECT_THROW(CompactPast(16, at(16), rows, rows, 4), c10::ValueError);
  EXPECT_THROW(CompactPast(16, at(3), rows.narrow(2, 0, 0), rows, 4), c10::ValueError);
  CompactPast past(16, at(3), rows, rows, 1);
  past.append(rows, rows);
  EXPECT_THROW(past.append(rows, rows), c10::ValueError);
}

}  // namespace
}  // namespace h2o_prefill::testing
