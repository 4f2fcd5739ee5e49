// The step that every CPU attention operator repeats, with the column sums or without: the
// operators themselves always want them.
#include <ATen/ops/from_blob.h>

#include <cstdint>

#include "kernels/cpu/attend_chunk.h"

// One chunk, of tensors [1, heads, length, dim] that lie in memory as [length, heads, dim], as
// Hugging Face models have them. dtype: a DType as an integer. indices null: rows attend causally
// to the `keys` = `rows` keys of their own chunk; else to all the listed keys of a history of
// `keys`, int32 [kv_heads, width]. lse: [query_heads, rows]. colsum: [kv_heads, keys or width],
// null if not wanted.
extern "C" __attribute__((visibility("default"))) void h2o_attend_chunk(
    int dtype, void* query, void* key, void* value, void* out, float* lse, float* colsum,
    const int32_t* indices, int64_t width, int64_t query_heads, int64_t kv_heads, int64_t rows,
    int64_t keys, int64_t dim) {
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kHalf};
  const auto tensor = [&](void* data, int64_t heads, int64_t length) {
    return at::from_blob(data, {1, heads, length, dim}, {0, dim, heads * dim, 1}, types[dtype]);
  };
  const h2o_prefill::AttentionArguments x{
      tensor(query, query_heads, rows), tensor(key, kv_heads, keys), tensor(value, kv_heads, keys)};
  const h2o_prefill::AttentionCall call(x, tensor(out, query_heads, rows), lse);
  const h2o_prefill::RowRange all{.begin = 0, .count = rows, .past = indices ? keys : 0};
  const int64_t count = indices ? width : keys;
  const h2o_prefill::ColumnSums sums{.data = colsum, .stride = count};
  h2o_prefill::Workspace workspace;
  h2o_prefill::AttendChunk attend(call, {.rows = rows, .keys = {count, 0}}, workspace);
  workspace.allocate();
  if (indices) {
    attend.run(call, all,
               {{h2o_prefill::MemorySetView{.positions = indices, .width = width}, sums}});
  } else {
    attend.run(call, all, {{own_keys(all), sums}});
  }
}
