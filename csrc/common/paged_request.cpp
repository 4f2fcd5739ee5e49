#include <ATen/ops/empty.h>

#include "common/checks.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

// x: with pages in the place of keys and values.
void check_pages(const AttentionArguments& x, const at::Tensor& table, int64_t total,
                 const at::Tensor& out) {
  check_dims("key_pages", x.key, 4);
  check_dims("value_pages", x.value, 4);
  check_size("value_pages", x.value, 0, x.key.size(0), "as many pages as of keys");
  AttentionArguments page = x;
  page.key = x.key.slice(0, 0, 1);
  page.value = x.value.slice(0, 0, 1);
  check_qkv(page, "key_pages", "value_pages");
  check_size("q", x.query, 0, 1, "one request");
  check_at_least("rows of key_pages", x.key.size(2), 1);
  check_dims("page_table", table, 1);
  TORCH_CHECK_VALUE(table.scalar_type() == at::kInt || table.scalar_type() == at::kLong,
                    "page_table must be int32 or int64, got ", describe(table));
  check_device("page_table", table, x.query, "q");
  check_between("total", total, x.length(), table.size(0) * x.key.size(2));
  if (table.is_cpu()) {
    const auto pages = table.narrow(0, 0, divide_up(total, x.key.size(2))).to(at::kLong);
    for (int64_t i = 0; i < pages.size(0); ++i) {
      check_index("page_table", pages.const_data_ptr<int64_t>()[i * pages.stride(0)],
                  x.key.size(0));
    }
  }
  check_dims("out", out, 4);
  check_same_kind("out", out, x.query, "q");
  const std::vector<int64_t> sizes{1, x.query.size(1), x.length(), x.value.size(3)};
  TORCH_CHECK_VALUE(out.sizes() == sizes, "out must be ", sizes, ", got shape ", out.sizes());
  check_no_internal_overlap({"out", out});
}

}  // namespace

PlacedCall place_paged_call(const AttentionArguments& pages, const at::Tensor& table, int64_t total,
                            const at::Tensor& out, const OptionalTensor& memory,
                            const OptionalTensor& scores, const OptionalTensor& errors,
                            const RecallLists& recall, int64_t layer, std::string_view settings,
                            int64_t checkpoints, GatherPages gather) {
  check_at_least("layer", layer, 0);
  const auto config = read_settings(settings);
  check_pages(pages, table, total, out);
  PrefillRequest request{pages};
  request.key = gather(pages.key, table, total);
  request.value = gather(pages.value, table, total);
  request.settings = config->of_layer(layer);
  request.recall = recall;
  request.start = or_undefined(memory);
  request.last_chunk_begin = memory ? request.past() : 0;
  request.check();
  check_between("checkpoints", checkpoints, 0, request.num_chunks());
  TORCH_CHECK_VALUE(
      memory.has_value() == scores.has_value() && memory.has_value() == errors.has_value(),
      "memory, scores and errors must be given together");
  if (memory) {
    check_per_kv_head("scores", *scores, request.key, accumulate_type(pages.query), "q");
    check_size("scores", *scores, 2, memory->size(2), "one a position of memory");
  }
  request.take_copies({}, memory, errors);
  if (memory) accumulate_scores_(request.scores, *memory, *scores);
  const bool is_sparse = config->is_sparse(layer, /*past=*/0, config->sparse_from());
  const int64_t count = is_sparse ? checkpoints : 0, width = request.settings.memory_size();
  const auto empty = [&](const at::Tensor& like, int64_t fields) {
    return at::empty({count, 1, like.size(1), fields}, like.options());
  };
  request.checkpoints = {.memory = empty(request.memory, width),
                         .scores = empty(request.scores, width),
                         .errors = empty(request.errors, kErrorFields)};
  request.first_checkpoint = request.num_chunks() - count;
  return {is_sparse, std::move(request)};
}

}  // namespace h2o_prefill
