#include <ATen/ops/empty.h>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

// x: with pages in the place of keys and values.
void check_pages(const AttentionArguments& x, const at::Tensor& table, int64_t total) {
  const at::Tensor& keys = x.key;
  check_dims("q", x.query, 4);
  check_dims("key_pages", keys, 4);
  check_dims("value_pages", x.value, 4);
  check_size("q", x.query, 0, 1, "one request");
  check_size("value_pages", x.value, 0, keys.size(0), "as many pages as of keys");
  check_at_least("rows of key_pages", keys.size(2), 1);
  AttentionArguments page = x;
  page.key = keys.slice(0, 0, 1);
  page.value = x.value.slice(0, 0, 1);
  check_qkv(page, "key_pages", "value_pages");
  check_dims("page_table", table, 1);
  TORCH_CHECK_VALUE(table.scalar_type() == at::kInt || table.scalar_type() == at::kLong,
                    "page_table must be int32 or int64, got ", describe(table));
  check_device("page_table", table, x.query, "q");
  check_between("total", total, x.length(), table.size(0) * keys.size(2));
  if (!table.is_cpu()) return;
  const auto pages = table.narrow(0, 0, divide_up(total, keys.size(2))).to(at::kLong).contiguous();
  const int64_t* const numbers = pages.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pages.size(0); ++i) check_index("page_table", numbers[i], keys.size(0));
}

void check_out(const at::Tensor& out, const AttentionArguments& pages, const at::Tensor& table,
               const Checkpoints& state, const RecallLists& recall) {
  const at::Tensor& q = pages.query;
  check_dims("out", out, 4);
  check_same_kind("out", out, q, "q");
  const std::vector<int64_t> sizes{1, q.size(1), q.size(2), pages.value.size(3)};
  TORCH_CHECK_VALUE(out.sizes() == sizes, "out must be ", sizes, ", got shape ", out.sizes());
  check_no_internal_overlap({"out", out});
  const NamedTensor others[] = {{"q", q},
                                {"key_pages", pages.key},
                                {"value_pages", pages.value},
                                {"page_table", table},
                                {"memory", state.memory},
                                {"scores", state.scores},
                                {"errors", state.errors},
                                {"recall_offsets", recall.offsets},
                                {"recall_positions", recall.positions},
                                {"recall_visible_from", recall.visible_from}};
  for (const NamedTensor& other : others) {
    if (other.tensor.defined()) check_no_overlap({"out", out}, other);
  }
}

}  // namespace

PlacedCall place_paged_call(const at::Tensor& query, const at::Tensor& key_pages,
                            const at::Tensor& value_pages, const at::Tensor& table, int64_t total,
                            const at::Tensor& out, const Checkpoints& state,
                            const LayerOptions& options, int64_t checkpoints, GatherPages gather) {
  check_at_least("layer", options.layer, 0);
  const auto settings = read_settings(options.settings);
  PrefillRequest request{{query, key_pages, value_pages, options.scale}};
  check_pages(request, table, total);
  check_out(out, request, table, state, options.recall);
  request.settings = settings->of_layer(options.layer);
  check_between("checkpoints", checkpoints, 0, request.num_chunks());
  request.key = gather(key_pages, table, total);
  request.value = gather(value_pages, table, total);
  const auto& [memory, scores, errors] = state;
  TORCH_CHECK_VALUE(memory.defined() == scores.defined() && memory.defined() == errors.defined(),
                    "memory, scores and errors must be given together");
  request.start = memory;
  request.last_chunk_begin = memory.defined() ? request.past() : 0;
  request.recall = options.recall;
  request.check();
  if (memory.defined()) {
    check_per_kv_head("scores", scores, request.key, accumulate_type(query), "q");
    check_size("scores", scores, 2, memory.size(2), "one a position of memory");
    request.take_copies({}, memory, errors);
    accumulate_scores_(request.scores, memory, scores);
  } else {
    request.take_copies({}, {}, {});
  }
  const bool is_sparse = settings->is_sparse(options.layer, 0, settings->sparse_from());
  const int64_t count = is_sparse ? checkpoints : 0;
  const auto empty = [&](const at::Tensor& like, int64_t width) {
    return at::empty({count, 1, like.size(1), width}, like.options());
  };
  const int64_t width = request.settings.memory_size();
  request.checkpoints = {.memory = empty(request.memory, width),
                         .scores = empty(request.scores, width),
                         .errors = empty(request.errors, kErrorFields)};
  request.first_checkpoint = request.num_chunks() - count;
  return {is_sparse, std::move(request)};
}

}  // namespace h2o_prefill
