// One call of one layer as every implementation of sparse prefill receives it: checked tensors, the
// state that is read and written in place, recalled keys, settings.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>

#include "common/attention.h"
#include "common/memory_sets.h"
#include "common/tensors.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/ops.h"
#include "kernels/widening.h"

namespace h2o_prefill {

// From the three optional tensors of a schema.
inline RecallLists recall_lists(const OptionalTensor& offsets, const OptionalTensor& positions,
                                const OptionalTensor& visible_from) {
  return {or_undefined(offsets), or_undefined(positions), or_undefined(visible_from)};
}

// The lists with convert() of each; none stay none.
template <typename Convert>
RecallLists converted(const RecallLists& lists, const Convert& convert) {
  if (!lists.offsets.defined()) return {};
  return {.offsets = convert(lists.offsets),
          .positions = convert(lists.positions),
          .visible_from = convert(lists.visible_from)};
}

struct PrefillRequest : AttentionArguments {
  // [B, Hkv, T_total or more], contiguous. On entry the scores of earlier positions, 0 where
  // there is none; on return the scores of all positions.
  at::Tensor scores = {};
  // int32 [B, Hkv, any]: the sets that the last chunk attended to; undefined: there was none.
  at::Tensor start = {};
  // int32 [B, Hkv, memory_size() of the settings or more], contiguous: on return the sets that the
  // call's last chunk attended to, followed by -1. May be `start`.
  at::Tensor memory = {};
  // fp32 [B, Hkv, kErrorFields], contiguous: LayerState::errors, updated. Undefined: none so far,
  // where the settings measure none.
  at::Tensor errors = {};
  int64_t last_chunk_begin = 0;
  Checkpoints checkpoints = {};  // written, where they are defined
  int64_t first_checkpoint = 0;  // the chunk at whose end the first of them is

  RecallLists recall = {};
  PrefillConfig settings = {};  // of the layer

  int64_t units() const { return key.size(0) * key.size(1); }
  MemoryBudget budget() const { return budget_of(settings); }
  // No memory set has more members.
  int64_t most_members() const { return std::min(settings.memory_size(), total()); }
  // The rows of all chunks in which errors are measured.
  MeasuredRows measured_rows() const {
    return {.length = length(),
            .past = past(),
            .chunk_size = settings.chunk_size,
            .count = settings.error_rows};
  }
  WideningRule widening() const { return widening_of(settings); }
  // The factors of all units.
  std::vector<int32_t> factors() const { return factors_of_heads(settings, errors, key.sizes()); }
  bool reduce_max() const { return settings.gqa_reduce == "max"; }

  // Maximum number of rows of a chunk, and of positions between two selections.
  int64_t largest_chunk() const { return std::min(settings.chunk_size, length()); }
  int64_t largest_step() const { return std::max(largest_chunk(), past() - last_chunk_begin); }
  // Whether any chunk has something before it, so that memory sets are selected.
  bool selects() const { return past() > 0 || length() > settings.chunk_size; }
  int64_t num_chunks() const { return divide_up(length(), settings.chunk_size); }
  int64_t num_checkpoints() const {
    return checkpoints.memory.defined() ? checkpoints.memory.size(0) : 0;
  }
  bool ends_at_checkpoint() const {
    return num_checkpoints() > 0 && first_checkpoint + num_checkpoints() == num_chunks();
  }
  // Calls write(memory) for the memory sets of the checkpoint at a row of the call, int32 [B, Hkv,
  // memory_size()], and copies their scores and errors, if the caller wants one there.
  template <typename Write>
  void keep_checkpoint(int64_t row, const Write& write) const {
    const int64_t number = divide_up(row, settings.chunk_size) - 1 - first_checkpoint;
    if (number < 0 || number >= num_checkpoints()) return;
    write(checkpoints.memory.select(0, number));
    fill_checkpoint(number);
  }
  void fill_checkpoint(int64_t number) const;
  bool recalls() const { return recall.offsets.defined(); }
  int64_t recall_blocks() const;

  // Throws c10::ValueError if a tensor, a list or a setting is wrong. `scores` and `memory` are
  // checked where they are allocated or passed in.
  void check() const;

  // Gives the call its own scores and memory, which continue the earlier ones. Throws
  // c10::ValueError if these do not belong to the call.
  void take_copies(const OptionalTensor& earlier_scores, const OptionalTensor& earlier_memory,
                   const OptionalTensor& earlier_errors);

  // The lists as kernels read them. lists: on the kernels' device, contiguous.
  RecallView recall_view(const RecallLists& lists) const;
};

// Calls with(rows) for each chunk of a call, in order.
template <typename With>
void for_each_chunk(const PrefillRequest& request, const With& with) {
  const int64_t size = request.settings.chunk_size;
  for (int64_t row = 0; row < request.length(); row += size) {
    with(RowRange{
        .begin = row, .count = std::min(size, request.length() - row), .past = request.past()});
  }
}

// A call of prefill_attention_ whose keys and values are in the buffers. The request's key and
// value are views of the whole history.
struct PlacedCall {
  bool is_sparse;
  PrefillRequest request;
};

// Whether a layer's sliding window, if it has one, hides nothing of a history of `total` tokens.
inline bool fits_window(std::optional<int64_t> window, int64_t total) {
  return !window || *window >= total;
}

// Rows of a buffer [B, H, capacity, D] from `begin` on become x.
void write_rows(const at::Tensor& buffer, int64_t begin, const at::Tensor& x);

// Checks the arguments of prefill_attention_(), writes the call's keys and values into the buffers,
// and sets the scores of a dense call's tokens to 0. A call whose window hides some keys is dense.
PlacedCall place_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const PrefillBuffers& buffers, const at::Tensor& position,
                      const LayerOptions& options, const Checkpoints& checkpoints);

// Copies the rows of `total` tokens out of pages [pages, H, size, D], by the numbers of the pages,
// to [1, H, total, D].
using GatherPages = at::Tensor (*)(const at::Tensor& pages, const at::Tensor& table, int64_t total);

// Checks the arguments of paged_sparse_attention_(), and gathers its keys and values.
PlacedCall place_paged_call(const AttentionArguments& pages, const at::Tensor& table, int64_t total,
                            const at::Tensor& out, const OptionalTensor& memory,
                            const OptionalTensor& scores, const OptionalTensor& errors,
                            const RecallLists& recall, int64_t layer, std::string_view settings,
                            int64_t checkpoints, GatherPages gather);

// The position of prefill_attention_: int64 [2] on the CPU.
struct Position {
  int64_t past;              // tokens before the call
  int64_t last_chunk_begin;  // where the last sparse chunk began

  // Throws c10::ValueError if the tensor is something else, or one of them negative.
  static Position read(const at::Tensor& position);
};

// Parses a settings text; results are cached.
std::shared_ptr<const PrefillConfig> read_settings(std::string_view text);

}  // namespace h2o_prefill
