// The past of a range of chunks, for one layer, as the few rows of keys and values that the range
// can see: the memory sets at its beginning and the positions that lexical recall names. So the
// chunks of a prompt can be spread over processes, or come back after their past has left memory:
//
//   CompactPast past(begin, needed, key_rows, value_rows, /*room=*/tokens, memory);
//   auto [keys, values] = past.append(key, value);   // of the range's tokens
//   auto [out, state] = chunked_sparse_attention(query, keys, values, past.state(), settings,
//                                                past.recall_lists(lists));
//   MemoryRows next = past.memory_rows(state, keys, values, settings);   // for the next range
//
// Results equal one call's, to the bit: all rules of the method (the last L, the first K, the
// lower of two positions with equal scores, keys recalled before a chunk) depend on the order of
// positions alone, so that operators take the rows as if nothing lay between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Returns the most positions of a head's memory set, K + L + H, with these errors of the layer,
// fp32 [B, Hkv, kErrorFields].
H2O_API int64_t memory_width(const at::Tensor& errors, const PrefillConfig& settings);

// Returns the set that the next chunk after a state attends to, int32 [B, Hkv, memory_width()].
H2O_API at::Tensor next_memory(const LayerState& state, const PrefillConfig& settings);

// The memory sets that the next chunk of one layer attends to, with their rows.
struct MemoryRows {
  at::Tensor positions = {};  // int32 [B, Hkv, M], ascending, then -1
  at::Tensor scores = {};     // [B, Hkv, M], attention that each position received so far
  at::Tensor keys = {};       // [B, Hkv, M, D]
  at::Tensor values = {};     // [B, Hkv, M, Dv]
  at::Tensor errors = {};     // fp32 [B, Hkv, kErrorFields]
};

class H2O_API CompactPast : public torch::CustomClassHolder {
 public:
  // begin: the first position of the range. needed: int64 [n] on the CPU, ascending, positions
  // before it whose key [B, Hkv, n, D] and value [B, Hkv, n, Dv] are here in all heads. room: rows
  // reserved for the range's own tokens. memory: the memory sets at `begin`. Throws c10::ValueError
  // if sizes do not match or positions are not before `begin`.
  CompactPast(int64_t begin, const at::Tensor& needed, const at::Tensor& key,
              const at::Tensor& value, int64_t room, const std::optional<MemoryRows>& memory = {});

  // There are no copies, which would share the reserved rows.
  CompactPast& operator=(CompactPast&&) = delete;

  // Positions of the rows, int64 [P] on the CPU, ascending.
  const at::Tensor& table() const { return table_; }

  // Keys [B, Hkv, P + own, D] and values of the rows and of the tokens appended so far. A row that
  // is in the memory set of another head alone is 0.
  at::Tensor keys() const { return keys_.narrow(2, 0, length_); }
  at::Tensor values() const { return values_.narrow(2, 0, length_); }

  // Writes keys [B, Hkv, T, D] and values of the next tokens of the range into the reserved rows;
  // returns keys() and values(). Throws c10::ValueError if they need more room.
  std::tuple<at::Tensor, at::Tensor> append(const at::Tensor& key, const at::Tensor& value);

  // Scores and memory sets with the numbers of the rows in place of their positions; undefined
  // tensors without memory sets.
  const LayerState& state() const { return state_; }

  // Lists of recalled keys with the numbers of rows in place of positions.
  RecallLists recall_lists(const RecallLists& lists) const;

  // Positions of rows, int32; -1 stays -1.
  at::Tensor positions_of(const at::Tensor& numbers) const;

  // The memory sets after the range, which the next one begins with. state, keys [B, Hkv, P + T, D]
  // and values are of the past and the range, settings of the layer.
  MemoryRows memory_rows(const LayerState& state, const at::Tensor& keys, const at::Tensor& values,
                         const PrefillConfig& settings) const;

  // The state after the range with positions; scores of evicted ones are 0.
  LayerState whole_state(const LayerState& state) const;

 private:
  int64_t begin_;
  int64_t length_;  // rows in use
  at::Tensor table_, keys_, values_;
  LayerState state_;
};

}  // namespace h2o_prefill
