// Attention of a range of rows, over all heads, to up to two key sets and recalled keys: the step
// that every CPU attention op repeats.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cpu/workspace.h"
#include "kernels/key_sets.h"
#include "kernels/params.h"

namespace h2o_prefill {

// Destination of a key set's column sums; unit u starts at data + u * stride. Null: not computed.
struct ColumnSums {
  float* data = nullptr;
  int64_t stride = 0;
};

// A key set before it is packed: a range of the history, or the units' memory sets.
struct KeySource {
  enum class Kind { kRange, kMemory };

  Kind kind = Kind::kRange;
  CausalRange range{};
  MemorySetView memory{};
  ColumnSums sums{};

  int64_t width() const { return kind == Kind::kRange ? range.count : memory.width; }
  int64_t count(int64_t unit) const {
    return kind == Kind::kRange ? range.count : memory.count(unit);
  }
};

struct AttendChunkArgs {
  HeadsView query;  // all queries of the call
  HeadsView key;    // the whole history
  HeadsView value;
  HeadsView out;      // rows as query; float32 or the dtype of the query
  HeadsView earlier;  // a result over other keys to merge with, as out, float32; no data: none
  float* lse;         // [B, Hq, query.length]; holds the lse of `earlier` at first
  RowRange rows;
  float scale;
  const float* sinks = nullptr;  // [Hq], a further logit of each head's denominators; null: none
  float softcap = 0.0F;          // logits z become softcap tanh(z / softcap); 0: they do not
  bool reduce_max;  // column sums of a group: the maximum over its heads instead of the sum
  KeySource sets[2];
  int num_sets;
  RecallView recall;  // keys of sets[1] and keys not before the rows are left out
};

// The passes, each over `rows` of a call whose tensors, scale and recalled keys `call` names.
//
// Phase 1: the rows are a chunk, and attend to its keys causally.
AttendChunkArgs chunk_pass(const AttendChunkArgs& call, const RowRange& rows, ColumnSums sums);
// Both phases of a chunk in one pass: its own keys, its memory sets and its recalled keys.
AttendChunkArgs chunk_and_memory_pass(const AttendChunkArgs& call, const RowRange& rows,
                                      ColumnSums chunk_sums, const MemorySetView& memory,
                                      ColumnSums memory_sums);
// Phase 2 alone.
AttendChunkArgs memory_pass(const AttendChunkArgs& call, const RowRange& rows,
                            const MemorySetView& memory, ColumnSums sums);
// Dense attention to one or two ranges of keys. second.count 0: there is none.
AttendChunkArgs range_pass(const AttendChunkArgs& call, const RowRange& rows,
                           const CausalRange& first, const CausalRange& second);

// Upper bounds over all passes of a call.
struct AttendLimits {
  int64_t rows;
  int64_t keys[2];  // of set 0 and set 1
};

// Runs the passes of one op call in one workspace.
class AttendChunk {
 public:
  // Plans its part of the workspace, which is allocated before run().
  AttendChunk(const HeadsView& query, const HeadsView& key, const HeadsView& value,
              const RecallView& recall, const AttendLimits& limits, Workspace& workspace);
  ~AttendChunk();

  void run(const AttendChunkArgs& args);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace h2o_prefill
