#include "common/prefill_request.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/config_fields.h"
#include "common/rules.h"
#include "common/tensors.h"

namespace h2o_prefill {
namespace {

// Lists of recalled keys on the host. A bad offset or position would read outside of the history; a
// position twice in a block would count twice.
void check_recall_values(const RecallLists& lists, int64_t total) {
  const auto offsets = lists.offsets.contiguous();
  const auto positions = lists.positions.contiguous();
  const auto visible_from = lists.visible_from.contiguous();
  const int32_t* const offset = offsets.const_data_ptr<int32_t>();
  const int32_t* const position = positions.const_data_ptr<int32_t>();
  const int32_t* const visible = visible_from.const_data_ptr<int32_t>();
  const int64_t blocks = offsets.size(0) - 1;
  const int64_t entries = positions.size(0);
  TORCH_CHECK_VALUE(
      offset[0] == 0 && offset[blocks] == entries && std::is_sorted(offset, offset + blocks + 1),
      "recall_offsets must rise from 0 to the number of recalled positions, ", entries,
      "; do the recall lists belong to another call?");
  at::parallel_for(0, blocks, /*grain_size=*/64, [&](int64_t first, int64_t last) {
    std::vector<int32_t> listed(total, -1);  // the last block that lists a position
    for (int64_t block = first; block < last; ++block) {
      for (int32_t i = offset[block]; i < offset[block + 1]; ++i) {
        TORCH_CHECK_VALUE(position[i] >= 0 && position[i] < total,
                          "recall_positions must be in [0, ", total, "), got ", position[i],
                          "; do the recall lists belong to another call?");
        TORCH_CHECK_VALUE(listed[position[i]] != block,
                          "recall_positions must name a position once a block, got ", position[i],
                          " twice in block ", block);
        TORCH_CHECK_VALUE(i == offset[block] || visible[i - 1] <= visible[i],
                          "recall_visible_from must rise inside a block, got ", visible[i],
                          " after ", visible[i - 1]);
        listed[position[i]] = static_cast<int32_t>(block);
      }
    }
  });
}

std::vector<NamedTensor> defined_among(std::initializer_list<NamedTensor> tensors) {
  std::vector<NamedTensor> defined;
  std::ranges::copy_if(tensors, std::back_inserter(defined),
                       [](const NamedTensor& x) { return x.tensor.defined(); });
  return defined;
}

void check_recall_lists(const PrefillRequest& request) {
  const RecallLists& lists = request.recall;
  const auto defined = defined_among({{"recall_offsets", lists.offsets},
                                      {"recall_positions", lists.positions},
                                      {"recall_visible_from", lists.visible_from}});
  if (defined.empty()) return;
  TORCH_CHECK_VALUE(
      defined.size() == 3,
      "recall_offsets, recall_positions and recall_visible_from must be given together");
  for (const auto& [name, list] : defined) {
    check_dims(name, list, 1);
    check_dtype(name, list, at::kInt);
    // The host finds them (see lexical_recall); a kernel of another device copies them.
    if (!list.is_cpu()) check_device(name, list, request.query, "q");
  }
  const int64_t offsets = request.query.size(0) * request.recall_blocks() + 1;
  TORCH_CHECK_VALUE(lists.offsets.size(0) == offsets, "recall_offsets must have ", offsets,
                    " entries, one a block of ", request.settings.recall_block(),
                    " rows and batch row and one more, got ", lists.offsets.size(0),
                    "; do the recall lists belong to another call?");
  check_size("recall_visible_from", lists.visible_from, 0, lists.positions.size(0),
             "one entry a position");
  if (lists.offsets.is_cpu() && lists.positions.is_cpu() && lists.visible_from.is_cpu()) {
    check_recall_values(lists, request.total());
  }
}

// Rows of a call that go into a buffer [B, Hkv, capacity, D].
void check_rows(const char* name, const at::Tensor& rows, const at::Tensor& buffer,
                int64_t length) {
  check_dims(name, rows, 4);
  check_same_kind(name, rows, buffer, "its buffer");
  check_size(name, rows, 0, buffer.size(0), "the batch size");
  check_size(name, rows, 1, buffer.size(1), "the KV heads");
  check_size(name, rows, 2, length, "the length of q");
  check_size(name, rows, 3, buffer.size(3), "the head dim");
}

// x: the call, with the whole buffers of keys and values, which must have room for its tokens after
// `past` ones. key and value: of the call.
void check_buffers(const AttentionArguments& x, const at::Tensor& key, const at::Tensor& value,
                   const PrefillBuffers& buffers, int64_t past) {
  check_qkv(x, "cache_key", "cache_value");
  const int64_t length = x.length(), capacity = x.total();
  if (key.defined() || value.defined()) {
    check_rows("k", key, buffers.key, length);
    check_rows("v", value, buffers.value, length);
  }
  TORCH_CHECK_VALUE(past <= capacity && length <= capacity - past,
                    "cache_key must have room for the tokens before the call, ", past,
                    ", and its own, ", length, ", got a capacity of ", capacity);
  check_per_kv_head("scores", buffers.scores, x.key, accumulate_type(x.query), "q");
  check_per_kv_head("memory", buffers.memory, x.key, at::kInt, "q");
  if (buffers.errors.defined()) check_errors(buffers.errors, x.key, /*is_state=*/past > 0);
}

void check_overlaps(const AttentionArguments& x, const at::Tensor& key, const at::Tensor& value,
                    const PrefillBuffers& buffers, const at::Tensor& position,
                    const RecallLists& recall, const Checkpoints& checkpoints) {
  auto written = defined_among({{"scores", buffers.scores},
                                {"memory", buffers.memory},
                                {"errors", buffers.errors},
                                {"checkpoint_memory", checkpoints.memory},
                                {"checkpoint_scores", checkpoints.scores},
                                {"checkpoint_errors", checkpoints.errors}});
  const at::Tensor sinks = or_undefined(x.sinks);
  auto read = defined_among({{"recall_offsets", recall.offsets},
                             {"recall_positions", recall.positions},
                             {"recall_visible_from", recall.visible_from},
                             {"q", x.query},
                             {"k", key},
                             {"v", value},
                             {"position", position},
                             {"sinks", sinks}});
  auto& caches = key.defined() ? written : read;
  caches.push_back({"cache_key", buffers.key});
  caches.push_back({"cache_value", buffers.value});
  for (size_t i = 0; i < written.size(); ++i) {
    check_no_internal_overlap(written[i]);
    check_no_overlap(written[i], read);
    check_no_overlap(written[i], c10::ArrayRef(written).slice(i + 1));
  }
}

// The buffers that only a sparse call writes.
void check_state_buffers(const PrefillRequest& request) {
  TORCH_CHECK_VALUE(request.scores.is_contiguous() && request.scores.size(2) >= request.total(),
                    "scores must be contiguous with room for ", request.total(),
                    " tokens, got shape ", request.scores.sizes());
  TORCH_CHECK_VALUE(
      request.memory.is_contiguous() && request.memory.size(2) >= request.settings.memory_size(),
      "memory must be contiguous with room for K + L + H positions (",
      request.settings.memory_size(), "), got shape ", request.memory.sizes());
  if (request.settings.error_rows == 0) return;
  TORCH_CHECK_VALUE(request.errors.defined() && request.errors.is_contiguous(),
                    "errors must be given and contiguous where the settings have error_rows");
}

void check_checkpoints(const PrefillRequest& request) {
  const auto& [memory, scores, errors] = request.checkpoints;
  if (!memory.defined() && !scores.defined() && !errors.defined()) return;
  TORCH_CHECK_VALUE(memory.defined() && scores.defined() && errors.defined(),
                    "checkpoint_memory, checkpoint_scores and checkpoint_errors must be given "
                    "together");
  const auto check = [&](const char* name, const at::Tensor& x, at::ScalarType dtype,
                         int64_t width) {
    const std::vector<int64_t> sizes{request.length() / request.settings.chunk_size,
                                     request.key.size(0), request.key.size(1), width};
    TORCH_CHECK_VALUE(x.sizes() == sizes && x.is_contiguous(), name, " must be contiguous ", sizes,
                      ", got shape ", x.sizes());
    check_dtype(name, x, dtype);
    check_device(name, x, request.query, "q");
  };
  const int64_t width = request.settings.memory_size();
  check("checkpoint_memory", memory, at::kInt, width);
  check("checkpoint_scores", scores, accumulate_type(request.query), width);
  check("checkpoint_errors", errors, at::kFloat, kErrorFields);
}

// Whether rows of x [B, H, T, D] can be copied one by one, in the calling thread.
bool has_few_plain_rows(const at::Tensor& x) {
  return x.is_cpu() && x.stride(3) == 1 && x.numel() <= at::internal::GRAIN_SIZE;
}

}  // namespace

void write_rows(const at::Tensor& buffer, int64_t begin, const at::Tensor& x) {
  const auto item = static_cast<int64_t>(x.itemsize());
  if (!has_few_plain_rows(x) || buffer.stride(3) != 1) {
    buffer.narrow(2, begin, x.size(2)).copy_(x);
    return;
  }
  char* const rows =
      static_cast<char*>(buffer.mutable_data_ptr()) + begin * buffer.stride(2) * item;
  const auto* const source = static_cast<const char*>(x.const_data_ptr());
  // While decoding, narrow() and copy_() would take longer than the copy itself.
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      for (int64_t t = 0; t < x.size(2); ++t) {
        const auto offset = [&](const at::Tensor& y) {
          return (b * y.stride(0) + h * y.stride(1) + t * y.stride(2)) * item;
        };
        std::memcpy(rows + offset(buffer), source + offset(x), x.size(3) * item);
      }
    }
  }
}

void PrefillRequest::fill_checkpoint(int64_t number) const {
  const auto sets = checkpoints.memory.select(0, number);
  checkpoints.scores.select(0, number).copy_(scores_of_sets(scores, sets));
  const auto measured = checkpoints.errors.select(0, number);
  if (errors.defined()) {
    measured.copy_(errors);
  } else {
    measured.zero_();
  }
}

int64_t PrefillRequest::recall_blocks() const {
  return divide_up(length(), settings.recall_block());
}

void PrefillRequest::check() const {
  settings.check();
  check_qkv(*this);
  check_logit_options(*this);
  TORCH_CHECK_VALUE(past() >= 0, "k must hold the call's tokens, so be at least as long as q (",
                    length(), "), got ", total());
  TORCH_CHECK_VALUE(last_chunk_begin >= 0 && last_chunk_begin <= past(),
                    "last_chunk_begin must be in [0, ", past(),
                    "], the tokens before this call, got ", last_chunk_begin);
  if (start.defined()) check_memory_sets("memory", start, key, past());
  check_recall_lists(*this);
}

void PrefillRequest::take_copies(const OptionalTensor& earlier_scores,
                                 const OptionalTensor& earlier_memory,
                                 const OptionalTensor& earlier_errors) {
  if (earlier_scores) {
    check_per_kv_head("scores", *earlier_scores, key, accumulate_type(query), "q");
    TORCH_CHECK_VALUE(earlier_scores->size(2) <= total(), "scores must not be longer than k (",
                      total(), "), got ", earlier_scores->size(2));
  }
  const int64_t known = earlier_scores ? std::min(earlier_scores->size(2), past()) : 0;
  scores =
      at::empty({key.size(0), key.size(1), total()}, query.options().dtype(accumulate_type(query)));
  if (known > 0) scores.narrow(2, 0, known).copy_(earlier_scores->narrow(2, 0, known));
  if (known < past()) scores.narrow(2, known, past() - known).zero_();

  const int64_t width = settings.memory_size();
  if (is_empty() && earlier_memory && past() > 0) {
    memory =
        at::constant_pad_nd(*earlier_memory, {0, width - earlier_memory->size(2)}, -1).contiguous();
  } else {
    memory = at::full({key.size(0), key.size(1), width}, -1, query.options().dtype(at::kInt));
  }
  if (earlier_errors) {
    check_errors(*earlier_errors, key);
    errors = earlier_errors->clone(at::MemoryFormat::Contiguous);
  } else {
    errors = no_errors(key);
  }
}

RecallView PrefillRequest::recall_view(const RecallLists& lists) const {
  if (!lists.offsets.defined()) return {};
  return {.offsets = lists.offsets.const_data_ptr<int32_t>(),
          .positions = lists.positions.const_data_ptr<int32_t>(),
          .visible_from = lists.visible_from.const_data_ptr<int32_t>(),
          .entries = lists.positions.size(0),
          .block = settings.recall_block(),
          .blocks = recall_blocks()};
}

PlacedCall place_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const PrefillBuffers& buffers, const at::Tensor& position,
                      const LayerOptions& options, const Checkpoints& checkpoints) {
  check_at_least("layer", options.layer, 0);
  if (options.window) check_at_least("window", *options.window, 1);
  const auto settings = read_settings(options.settings);
  const auto [past, last_chunk_begin] = Position::read(position);
  PrefillRequest request{
      {query, buffers.key, buffers.value, options.scale, options.sinks, options.softcap}};
  check_buffers(request, key, value, buffers, past);
  check_logit_options(request);
  const int64_t length = request.length(), total = past + length;
  // The call that wrote the prompt has made sure of the buffers for the tokens decoded after it.
  if (length > 1 || past == 0) {
    check_overlaps(request, key, value, buffers, position, options.recall, checkpoints);
  }
  const bool is_sparse =
      settings->is_sparse(options.layer, past, length) && fits_window(options.window, total);
  request.key = buffers.key.narrow(2, 0, total);
  request.value = buffers.value.narrow(2, 0, total);
  request.scores = buffers.scores;
  request.memory = buffers.memory;
  request.errors = buffers.errors;
  request.last_chunk_begin = last_chunk_begin;
  request.checkpoints = checkpoints;
  if (is_sparse) {
    request.settings = settings->of_layer(options.layer);
    request.recall = options.recall;
    if (past > 0) request.start = buffers.memory;
    check_state_buffers(request);
    check_checkpoints(request);
    request.check();
  }
  if (past == 0 && length > 0) {
    // An earlier prompt may have left them.
    if (!is_sparse) buffers.memory.fill_(-1);
    if (buffers.errors.defined()) buffers.errors.zero_();
  }
  if (key.defined()) {
    write_rows(buffers.key, past, key);
    write_rows(buffers.value, past, value);
  }
  if (const int64_t scored = std::min(total, buffers.scores.size(2)); !is_sparse && scored > past) {
    buffers.scores.narrow(2, past, scored - past).zero_();
  }
  return {is_sparse, std::move(request)};
}

Position Position::read(const at::Tensor& position) {
  check_dims("position", position, 1);
  check_dtype("position", position, at::kLong);
  TORCH_CHECK_VALUE(position.is_cpu() && position.size(0) == 2,
                    "position must be int64 [2] on the CPU: the tokens so far, and where the last "
                    "sparse chunk began; got ",
                    describe(position));
  const int64_t* const values = position.const_data_ptr<int64_t>();
  const Position read{values[0], values[position.stride(0)]};
  TORCH_CHECK_VALUE(read.past >= 0 && read.last_chunk_begin >= 0,
                    "position must not be negative, got ", read.past, " and ",
                    read.last_chunk_begin);
  check_at_most("position", std::max(read.past, read.last_chunk_begin), kLargestSetting);
  return read;
}

std::shared_ptr<const PrefillConfig> read_settings(std::string_view text) {
  // A model uses few texts; the limit bounds memory for callers that pass ever new ones.
  constexpr size_t kMostTexts = 64;
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const PrefillConfig>, std::less<>> known;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto entry = known.find(text); entry != known.end()) return entry->second;
  }
  auto config = std::make_shared<const PrefillConfig>(PrefillConfig::parse(text));
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.size() >= kMostTexts) known.clear();
  known.emplace(text, config);
  return config;
}

}  // namespace h2o_prefill
