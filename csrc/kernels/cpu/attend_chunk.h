// Attention of a range of queries, over all heads, to up to two key sets and recalled keys: the
// step that every CPU attention op repeats.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/params.h"

namespace h2o_prefill {

// One key set before it is packed: positions of the KV history.
struct KeySource {
  int64_t begin = 0;  // [begin, begin + count) of the history ...
  int64_t count = 0;
  const int32_t* indices =
      nullptr;  // ... or indices[b, h, 0 .. counts[b, h]), with `count` as row stride
  const int64_t* counts = nullptr;
  bool causal = false;      // row r sees the first r + 1 keys
  float* colsum = nullptr;  // set to the column sums: element [b, h, j] at (b Hkv + h) *
                            // colsum_stride + j; null: not wanted
  int64_t colsum_stride = 0;
};

// Lists of recalled positions, ragged over blocks of rows of the call (see lexical_recall).
struct RecallSource {
  const int32_t* offsets = nullptr;  // null: no recall
  const int32_t* positions = nullptr;
  const int32_t* visible_from = nullptr;
  int64_t block = 0;
  int64_t blocks = 0;  // blocks of a batch row
};

struct AttendChunkArgs {
  HeadsView query;  // all queries of the call
  HeadsView key;    // the whole history
  HeadsView value;
  HeadsView out;  // rows as query; float32 or the dtype of the query
  float* lse;     // [B, Hq, query.length]
  int64_t begin;  // rows [begin, begin + rows) of the call
  int64_t rows;
  int64_t past;  // absolute position of row 0 of the call
  float scale;
  bool reduce_max;  // column sums of a group: the maximum over its heads instead of the sum
  KeySource sets[2];
  int num_sets;
  RecallSource recall;  // keys of sets[1] and keys not before this range are left out
};

// Owns the workspace of one op call; run() may be called for one range after another.
class AttendChunk {
 public:
  // max_keys: the most keys that a range's set 0 and set 1 will have.
  AttendChunk(const HeadsView& query, const HeadsView& key, const HeadsView& value,
              const RecallSource& recall, int64_t max_rows, int64_t max_keys0, int64_t max_keys1);
  ~AttendChunk();

  void run(const AttendChunkArgs& args);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace h2o_prefill
