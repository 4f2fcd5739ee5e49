#include "h2o_prefill/compact_past.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "common/checks.h"
#include "common/memory_sets.h"
#include "common/rules.h"

namespace h2o_prefill {
namespace {

int64_t widest(const std::vector<int32_t>& factors) {
  return factors.empty() ? 1 : *std::max_element(factors.begin(), factors.end());
}

// A buffer with rows [B, H, n, D] at `places` of the first rows, and others that are 0.
at::Tensor with_rows(const at::Tensor& rows, const at::Tensor& places, int64_t length) {
  auto buffer = at::zeros({rows.size(0), rows.size(1), length, rows.size(3)}, rows.options());
  buffer.index_copy_(2, places, rows);
  return buffer;
}

}  // namespace

int64_t memory_width(const at::Tensor& errors, const PrefillConfig& settings) {
  check_dims("errors", errors, 3);
  return budget_of(settings)
      .scaled(widest(factors_of_heads(settings, errors, errors.sizes())))
      .width();
}

at::Tensor next_memory(const LayerState& state, const PrefillConfig& settings) {
  const auto factors = factors_of_heads(settings, state.errors, state.memory.sizes());
  return select_sets(state.scores, state.memory, state.last_chunk_begin, state.scores.size(2),
                     budget_of(settings), factors,
                     budget_of(settings).scaled(widest(factors)).width());
}

CompactPast::CompactPast(int64_t begin, const at::Tensor& needed, const at::Tensor& key,
                         const at::Tensor& value, int64_t room,
                         const std::optional<MemoryRows>& memory)
    : begin_(begin), table_(needed) {
  check_at_least("room", room, 0);
  check_dims("needed", needed, 1);
  check_dims("key", key, 4);
  check_dims("value", value, 4);
  check_size("key", key, 2, needed.size(0), "a row for each needed position");
  check_size("value", value, 2, needed.size(0), "a row for each needed position");
  at::Tensor present;
  if (memory) {
    present = memory->positions >= 0;
    const auto held = memory->positions.masked_select(present).to(at::kCPU, at::kLong);
    table_ = std::get<0>(at::_unique(at::cat({needed, held})));
  }
  length_ = table_.size(0);
  TORCH_CHECK_VALUE(length_ == 0 || (table_[0].item<int64_t>() >= 0 &&
                                     table_[length_ - 1].item<int64_t>() < begin),
                    "positions of needed and memory must be in [0, ", begin, ")");
  const auto places = at::searchsorted(table_, needed).to(key.device());
  keys_ = with_rows(key, places, length_ + room);
  values_ = with_rows(value, places, length_ + room);
  if (!memory) return;
  // The last chunk before is elsewhere: the next memory sets are chosen among the present ones.
  const auto numbers =
      at::searchsorted(table_.to(key.device()), memory->positions.to(at::kLong).contiguous());
  const auto where = present.nonzero();
  const c10::List<std::optional<at::Tensor>> at{where.select(1, 0), where.select(1, 1),
                                                numbers.masked_select(present)};
  const auto rows_of = [&](const at::Tensor& x) { return x.index({present}); };
  keys_.index_put_(at, rows_of(memory->keys));
  values_.index_put_(at, rows_of(memory->values));
  auto scores = at::zeros({key.size(0), key.size(1), length_}, memory->scores.options());
  scores.index_put_(at, rows_of(memory->scores));
  state_ = {.scores = scores,
            .memory = at::where(present, numbers, -1).to(at::kInt),
            .last_chunk_begin = length_,
            .errors = memory->errors};
}

std::tuple<at::Tensor, at::Tensor> CompactPast::append(const at::Tensor& key,
                                                       const at::Tensor& value) {
  const int64_t tokens = key.size(2), left = keys_.size(2) - length_;
  TORCH_CHECK_VALUE(tokens <= left, "key must have at most ", left,
                    " tokens, for which there is room, got ", tokens);
  keys_.narrow(2, length_, tokens).copy_(key);
  values_.narrow(2, length_, tokens).copy_(value);
  length_ += tokens;
  return {keys(), values()};
}

RecallLists CompactPast::recall_lists(const RecallLists& lists) const {
  if (!lists.offsets.defined()) return lists;
  const auto positions = lists.positions.to(at::kLong);
  const int64_t shift = table_.size(0) - begin_;
  const auto earlier = at::searchsorted(table_.to(positions.device()), positions);
  const auto numbers = at::where(positions < begin_, earlier, positions + shift);
  return {.offsets = lists.offsets,
          .positions = numbers.to(at::kInt),
          .visible_from = lists.visible_from + shift};
}

at::Tensor CompactPast::positions_of(const at::Tensor& numbers) const {
  const int64_t rows = table_.size(0);
  const auto table = at::constant_pad_nd(table_, {0, 1}).to(numbers.device());
  const auto earlier = table.index({numbers.clamp(0, rows).to(at::kLong)});
  const auto positions = at::where(numbers < rows, earlier, numbers + (begin_ - rows));
  return at::where(numbers < 0, -1, positions).to(at::kInt);
}

MemoryRows CompactPast::memory_rows(const LayerState& state, const at::Tensor& keys,
                                    const at::Tensor& values, const PrefillConfig& settings) const {
  const auto chosen = next_memory(state, settings);
  return {.positions = positions_of(chosen),
          .scores = state.scores.gather(2, chosen.clamp_min(0).to(at::kLong)),
          .keys = gather_rows(keys, chosen),
          .values = gather_rows(values, chosen),
          .errors = state.errors};
}

LayerState CompactPast::whole_state(const LayerState& state) const {
  const int64_t rows = table_.size(0), own = state.scores.size(2) - rows;
  auto scores =
      at::zeros({state.scores.size(0), state.scores.size(1), begin_ + own}, state.scores.options());
  scores.index_copy_(2, table_.to(scores.device()), state.scores.narrow(2, 0, rows));
  scores.narrow(2, begin_, own).copy_(state.scores.narrow(2, rows, own));
  return {.scores = scores,
          .memory = positions_of(state.memory),
          .last_chunk_begin = state.last_chunk_begin - rows + begin_,
          .errors = state.errors};
}

}  // namespace h2o_prefill
