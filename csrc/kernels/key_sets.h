// Which keys the rows of a call attend to: the vocabulary that CPU and CUDA kernels share, without
// PyTorch types.
//
// The rows (queries) 0, 1, ... of a call are at positions past, past + 1, ... of the history of
// keys. A "unit" is a KV head of a batch row: b Hkv + h.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace h2o_prefill {

// Rows [begin, begin + count) of a call.
struct RowRange {
  int64_t begin;
  int64_t count;
  int64_t past;

  // Position of the first row.
  H2O_HOST_DEVICE int64_t position() const { return past + begin; }
};

// Keys [begin, begin + count) of the history; a row sees them up to its own position. In chunks of
// chunk_size keys, if that is not 0: a row sees its own chunk alone. With a
// window: a row sees the last `window` keys up to its own position.
struct CausalRange {
  static constexpr int64_t kNoWindow = INT32_MAX;  // no history is longer

  int64_t begin;
  int64_t count;
  int64_t chunk_size = 0;
  int64_t window = kNoWindow;

  // Of the keys that visible_from() counts, the first ones that lie before the row's window.
  H2O_HOST_DEVICE int64_t hidden_from(int64_t position) const {
    const int64_t hidden = position + 1 - window - begin;
    return hidden < 0 ? 0 : hidden < count ? hidden : count;
  }
  // Number of the keys that a row at `position` sees, if the range is one chunk.
  H2O_HOST_DEVICE int64_t visible_from(int64_t position) const {
    const int64_t visible = position + 1 - begin;
    return visible < 0 ? 0 : visible < count ? visible : count;
  }
};

// Sizes of a head's memory set: K first positions, L last ones before the chunk, and H with the
// highest scores among the others.
struct MemoryBudget {
  int64_t local_window;
  int64_t heavy_budget;
  int64_t sink_tokens;

  H2O_HOST_DEVICE int64_t width() const { return sink_tokens + local_window + heavy_budget; }
  H2O_HOST_DEVICE MemoryBudget scaled(int64_t factor) const {
    return {local_window * factor, heavy_budget * factor, sink_tokens};
  }
  // A budget that selects the same positions of a history of `length`, with no part larger than it.
  MemoryBudget within(int64_t length) const {
    const auto at_most = [length](int64_t part) { return part < length ? part : length; };
    return {at_most(local_window), at_most(heavy_budget), at_most(sink_tokens)};
  }
  // The local window of a set for the chunk at `chunk_begin` begins here, and the sinks end there.
  H2O_HOST_DEVICE int64_t local_begin(int64_t chunk_begin) const {
    return chunk_begin > local_window ? chunk_begin - local_window : 0;
  }
  H2O_HOST_DEVICE int64_t sink_end(int64_t chunk_begin) const {
    const int64_t begin = local_begin(chunk_begin);
    return sink_tokens < begin ? sink_tokens : begin;
  }
};

// The memory sets of all units: ascending positions, then -1.
struct MemorySetView {
  const int32_t* positions;  // [units, width]
  int64_t width;
  const int64_t* counts = nullptr;  // positions of each unit, where the host knows them

  H2O_HOST_DEVICE const int32_t* of_unit(int64_t unit) const { return positions + unit * width; }
  H2O_HOST_DEVICE int64_t count(int64_t unit) const { return counts ? counts[unit] : width; }
};

// Keys that blocks of rows recall (see lexical_recall): ragged lists, rising by visible_from. A row
// sees a key of its block's list from position visible_from on, if it lies before the row's chunk
// and is not in the head's memory set.
struct RecallView {
  const int32_t* offsets = nullptr;  // [batch * blocks + 1]; null: nothing is recalled
  const int32_t* positions = nullptr;
  const int32_t* visible_from = nullptr;
  int64_t entries = 0;  // of all lists
  int64_t block = 0;    // rows of a block, counted from row 0 of the call
  int64_t blocks = 0;   // of a batch row

  // The list of a row's block. All KV heads of a batch row share it.
  H2O_HOST_DEVICE int64_t list(int64_t batch, int64_t row) const {
    return batch * blocks + row / block;
  }
};

}  // namespace h2o_prefill
