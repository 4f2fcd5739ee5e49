// Attention of a range of rows, over all heads, to up to two key sets and recalled keys: the step
// that every CPU attention op repeats.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>

#include "common/attention.h"
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
  KeySource(const CausalRange& range, ColumnSums sums = {}) : range(range), sums(sums) {}
  KeySource(const MemorySetView& memory, ColumnSums sums)
      : is_memory(true), memory(memory), sums(sums) {}

  int64_t width() const { return is_memory ? memory.width : range.count; }
  int64_t count(int64_t unit) const { return is_memory ? memory.count(unit) : range.count; }

  bool is_memory = false;
  CausalRange range{};
  MemorySetView memory{};
  ColumnSums sums;
};

// Common to all passes of a call.
struct AttentionCall {
  // x: with contiguous rows (see with_rows()).
  AttentionCall(const AttentionArguments& x, const at::Tensor& out, float* lse)
      : query(heads_view(x.query)),
        key(heads_view(x.key)),
        value(heads_view(x.value)),
        out(heads_view(out)),
        lse(lse),
        scale(static_cast<float>(x.scale())),
        sinks(x.sink_data()),
        softcap(static_cast<float>(bounded_softcap(x.softcap))) {}

  HeadsView query;  // all queries of the call
  HeadsView key;    // the whole history
  HeadsView value;
  HeadsView out;        // rows as query; float32 or the dtype of the query
  HeadsView earlier{};  // a result over other keys to merge with, as out, float32; no data: none
  float* lse;           // [B, Hq, query.length]; holds the lse of `earlier` at first
  float scale;
  const float* sinks;       // [Hq], a further logit of each head's denominators; null: none
  float softcap;            // logits z become softcap tanh(z / softcap); 0: they do not
  bool reduce_max = false;  // column sums of a group: the maximum over its heads instead of the sum
  RecallView recall{};      // keys that passes with memory sets see besides
};

// The keys of a chunk, which its rows attend to causally.
inline CausalRange own_keys(const RowRange& rows) {
  return {.begin = rows.position(), .count = rows.count};
}

// Upper bounds over all passes of a call.
struct AttendLimits {
  int64_t rows;
  int64_t keys[2];  // of set 0 and set 1
};

// Runs the passes of one op call in one workspace.
class AttendChunk {
 public:
  // Plans its part of the workspace, which is allocated before run().
  AttendChunk(const AttentionCall& call, const AttendLimits& limits, Workspace& workspace);
  ~AttendChunk();

  // Attends with rows of a call to one or two key sets, the memory sets last. Besides these, rows
  // see the recalled keys that lie before the first of them and are not in their memory set.
  void run(const AttentionCall& call, const RowRange& rows, c10::ArrayRef<KeySource> sets);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace h2o_prefill
