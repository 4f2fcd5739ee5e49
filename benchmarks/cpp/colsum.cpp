// The step that every CPU attention operator repeats, with the column sums or without: the
// operators themselves always want them.
#include <cstdint>

#include "kernels/cpu/attend_chunk.h"

namespace {

using h2o_prefill::DType;
using h2o_prefill::HeadsView;

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
  h2o_prefill::AttendChunkArgs args{};
  args.query = view(query, dtype, query_heads, rows, dim);
  args.key = view(key, dtype, kv_heads, keys, dim);
  args.value = view(value, dtype, kv_heads, keys, dim);
  args.out = view(out, dtype, query_heads, rows, dim);
  args.lse = lse;
  args.rows = rows;
  args.scale = scale;
  args.num_sets = 1;
  args.sets[0].count = indices ? width : keys;
  args.sets[0].indices = indices;
  args.sets[0].causal = indices == nullptr;
  args.sets[0].colsum = colsum;
  args.sets[0].colsum_stride = args.sets[0].count;
  h2o_prefill::AttendChunk(args.query, args.key, args.value, {}, rows, args.sets[0].count, 0)
      .run(args);
}
