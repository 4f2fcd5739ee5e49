// The step that every CPU attention operator repeats, with the column sums or without: the
// operators themselves always want them.
#include <cstdint>

#include "kernels/cpu/attend_chunk.h"

namespace {

using h2o_prefill::AttendChunk;
using h2o_prefill::ColumnSums;
using h2o_prefill::DType;
using h2o_prefill::HeadsView;
using h2o_prefill::RowRange;
using h2o_prefill::Workspace;

// [1, heads, length, dim] lying in memory as [length, heads, dim], as Hugging Face models have it.
HeadsView view(void* data, int dtype, int64_t heads, int64_t length, int64_t dim) {
  return {data, static_cast<DType>(dtype), 1,   heads,      length,
          dim,  length * heads * dim,      dim, heads * dim};
}

}  // namespace

// One chunk. dtype: a DType as an integer. indices null: rows attend causally to the `keys` =
// `rows` keys of their own chunk; else to all the listed keys of a history of `keys`, int32
// [kv_heads, width]. lse: [query_heads, rows]. colsum: [kv_heads, keys or width], null if not
// wanted.
extern "C" __attribute__((visibility("default"))) void h2o_attend_chunk(
    int dtype, void* query, void* key, void* value, void* out, float* lse, float* colsum,
    const int32_t* indices, int64_t width, int64_t query_heads, int64_t kv_heads, int64_t rows,
    int64_t keys, int64_t dim, float scale) {
  const h2o_prefill::AttendChunkArgs call{.query = view(query, dtype, query_heads, rows, dim),
                                          .key = view(key, dtype, kv_heads, keys, dim),
                                          .value = view(value, dtype, kv_heads, keys, dim),
                                          .out = view(out, dtype, query_heads, rows, dim),
                                          .lse = lse,
                                          .rows = {},
                                          .scale = scale,
                                          .reduce_max = false,
                                          .sets = {},
                                          .num_sets = 0,
                                          .recall = {}};
  const RowRange all{.begin = 0, .count = rows, .past = indices ? keys : 0};
  const int64_t count = indices ? width : keys;
  const ColumnSums sums{.data = colsum, .stride = count};
  Workspace workspace;
  AttendChunk attend(call.query, call.key, call.value, call.recall,
                     {.rows = rows, .keys = {count, 0}}, workspace);
  workspace.allocate();
  attend.run(indices ? memory_pass(call, all, {.positions = indices, .width = width}, sums)
                     : chunk_pass(call, all, sums));
}
