#include "h2o_prefill/layer_state.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>

#include "common/checks.h"
#include "common/memory_sets.h"
#include "common/prefill_request.h"
#include "common/rules.h"
#include "common/tensors.h"
#include "core/state_header.h"

namespace h2o_prefill {
namespace {

void check_new_tokens(const at::Tensor& key, const at::Tensor& value) {
  check_dims("key", key, 4);
  check_dims("value", value, 4);
  check_same_kind("value", value, key, "key");
  TORCH_CHECK_VALUE(key.sizes().slice(0, 3) == value.sizes().slice(0, 3),
                    "value must have batch, heads and length of key ", key.sizes(), ", got shape ",
                    value.sizes());
  check_inference_only("key", key);
  check_inference_only("value", value);
}

bool fits(const at::Tensor& buffer, const at::Tensor& t) {
  return buffer.size(0) == t.size(0) && buffer.size(1) == t.size(1) &&
         buffer.size(3) == t.size(3) && buffer.scalar_type() == t.scalar_type() &&
         buffer.device() == t.device();
}

void check_like(const char* name, const at::Tensor& buffer, const at::Tensor& t) {
  TORCH_CHECK_VALUE(fits(buffer, t), name, " must be like the earlier ones, [", buffer.size(0),
                    ", ", buffer.size(1), ", *, ", buffer.size(3), "] ",
                    dtype_name(buffer.scalar_type()), " on ", buffer.device(), ", got ",
                    describe(t));
}

// A buffer of `capacity` rows like x that begins with the first `length` rows of another.
at::Tensor with_room(const at::Tensor& x, const at::Tensor& rows, int64_t length,
                     int64_t capacity) {
  auto buffer = at::empty({x.size(0), x.size(1), capacity, x.size(3)}, x.options());
  if (length > 0) buffer.narrow(2, 0, length).copy_(rows.narrow(2, 0, length));
  return buffer;
}

template <typename Change>
Checkpoints mapped(const Checkpoints& x, const Change& change) {
  return {.memory = change(x.memory), .scores = change(x.scores), .errors = change(x.errors)};
}

}  // namespace

LayerState::LayerState(bool checkpoints, int64_t initial_capacity, int64_t max_capacity)
    : keeps_checkpoints_(checkpoints),
      initial_capacity_(initial_capacity),
      max_capacity_(max_capacity) {
  check_at_least("initial_capacity", initial_capacity, 1);
  TORCH_CHECK_VALUE(max_capacity >= initial_capacity, "max_capacity must be >= initial_capacity (",
                    initial_capacity, "), got ", max_capacity);
}

c10::intrusive_ptr<LayerState> LayerState::of_buffers(const PrefillBuffers& buffers) {
  auto state = c10::make_intrusive<LayerState>();
  state->key_ = buffers.key;
  state->value_ = buffers.value;
  state->scores_ = buffers.scores;
  state->memory_ = buffers.memory;
  state->errors_ = buffers.errors;
  state->initial_capacity_ = state->max_capacity_ = state->capacity();
  return state;
}

void LayerState::commit(int64_t past, int64_t length, bool is_sparse, int64_t last_chunk_begin) {
  length_ = length;
  scored_ = is_sparse ? length : std::min(scored_, past);
  last_chunk_begin_ = last_chunk_begin;
  checkpoints_.erase(checkpoints_.upper_bound(past), checkpoints_.end());
}

void LayerState::check_fits(const LayerState& other) const {
  const auto check = [](const char* name, const at::Tensor& buffer, const at::Tensor& x) {
    bool fits = !x.defined() || (buffer.dim() == x.dim() && buffer.dtype() == x.dtype());
    for (int64_t i = 0; fits && x.defined() && i < x.dim(); ++i) {
      fits = i == 2 ? x.size(i) <= buffer.size(i) : x.size(i) == buffer.size(i);
    }
    TORCH_CHECK_VALUE(fits, name, " must fit ", describe(buffer), ", got ", describe(x));
  };
  TORCH_CHECK_VALUE(other.key_.defined() && other.scored_ <= other.length_,
                    "the state must have the keys of all tokens");
  check("key", key_, other.key());
  check("value", value_, other.value());
  check("memory", memory_, other.memory());
}

void LayerState::copy_from(const LayerState& other) {
  check_fits(other);
  truncate(0);
  const StateGuard guard;
  const auto copy = [](const at::Tensor& buffer, const at::Tensor& x) {
    if (x.defined()) buffer.narrow(2, 0, x.size(2)).copy_(x);
  };
  copy(key_, other.key());
  copy(value_, other.value());
  scores_.zero_();
  memory_.fill_(-1);
  errors_.zero_();
  copy(scores_, other.scores());
  copy(memory_, other.memory());
  copy(errors_, other.errors());
  length_ = other.length_;
  scored_ = other.scored_;
  last_chunk_begin_ = other.last_chunk_begin_;
  checkpoints_ = other.checkpoints_;  // never written to
}

void LayerState::configure(bool checkpoints, int64_t max_capacity) {
  keeps_checkpoints_ = checkpoints;
  max_capacity_ = max_capacity;
  initial_capacity_ = std::min(initial_capacity_, max_capacity);
  if (!checkpoints) checkpoints_.clear();
}

at::Tensor LayerState::in_use(const at::Tensor& buffer, int64_t length) {
  return buffer.defined() ? buffer.narrow(2, 0, length) : buffer;
}

std::tuple<at::Tensor, at::Tensor> LayerState::append(const at::Tensor& key,
                                                      const at::Tensor& value) {
  check_new_tokens(key, value);
  if (length_ > 0) {
    check_like("key", key_, key);
    check_like("value", value_, value);
  }
  const int64_t added = key.size(2), total = length_ + added;
  TORCH_CHECK_VALUE(total <= max_capacity_, "max_capacity must be >= ", total,
                    ", the tokens after this append, got ", max_capacity_);
  const StateGuard guard;
  const bool usable = key_.defined() && fits(key_, key) && fits(value_, value);
  const int64_t before = usable ? capacity() : 0;
  if (!usable || !owns_keys_ || total > before) {
    const int64_t wanted = std::max({total, 2 * before, initial_capacity_});
    const int64_t capacity = std::min(wanted, max_capacity_);
    auto grown = with_room(key, key_, length_, capacity);
    value_ = with_room(value, value_, length_, capacity);
    key_ = std::move(grown);
    owns_keys_ = true;
  }
  write_rows(key_, length_, key);
  write_rows(value_, length_, value);
  length_ = total;
  return {this->key(), this->value()};
}

void LayerState::set_keys(const at::Tensor& key, const at::Tensor& value) {
  check_new_tokens(key, value);
  check_at_most("tokens of key", key.size(2), max_capacity_);
  key_ = key;
  value_ = value;
  length_ = key.size(2);
  owns_keys_ = false;
}

void LayerState::reserve(const at::Tensor& key, int64_t tokens, int64_t memory_size) {
  const auto type = accumulate_type(key);
  const bool usable = memory_.defined() && memory_.sizes().slice(0, 2) == key.sizes().slice(0, 2) &&
                      scores_.scalar_type() == type && scores_.device() == key.device();
  TORCH_CHECK_VALUE(usable || !has_scores(), "key must fit the earlier calls, whose scores are ",
                    describe(scores_), ", got ", describe(key));
  const StateGuard guard;
  const int64_t batch = key.size(0), heads = key.size(1);
  const auto options = key.options().dtype(type);
  if (!usable) {
    scores_ = at::zeros({batch, heads, tokens}, options);
    memory_ = at::full({batch, heads, memory_size}, -1, options.dtype(at::kInt));
    errors_ = no_errors(key);
  }
  if (tokens > scores_.size(2)) {
    auto larger = at::zeros({batch, heads, std::max(tokens, 2 * scores_.size(2))}, options);
    larger.narrow(2, 0, scored_).copy_(in_use(scores_, scored_));
    scores_ = std::move(larger);
  }
  // If the settings have changed since, a larger set continues from the smaller one.
  if (const int64_t more = memory_size - memory_.size(2); more > 0) {
    memory_ = at::constant_pad_nd(memory_, {0, more}, -1);
  }
}

at::Tensor LayerState::attend(const at::Tensor& query, const LayerOptions& options,
                              std::optional<int64_t> total) {
  const int64_t tokens = total.value_or(length_);
  TORCH_CHECK_VALUE(key_.defined(), "key must be appended before a call attends");
  check_between("total", tokens, 0, length_);
  return attend_history(query, in_use(key_, tokens), in_use(value_, tokens), options);
}

at::Tensor LayerState::attend_history(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const LayerOptions& options) {
  TORCH_CHECK_VALUE(!failed_,
                    "an earlier call was interrupted: reset(), or truncate() to a "
                    "checkpoint, before the next");
  check_dims("query", query, 4);
  check_dims("key", key, 4);
  const int64_t length = query.size(2), total = key.size(2), past = total - length;
  TORCH_CHECK_VALUE(past >= 0, "key must hold the call's tokens (", length, "), got ", total);
  TORCH_CHECK_VALUE(past >= scored_ || length == 0, "tokens before the call must be >= ", scored_,
                    ", those that have scores, got ", past, ": truncate() first");
  const auto settings = read_settings(options.settings);
  const bool is_sparse = length > 0 && settings->is_sparse(options.layer, past, length) &&
                         fits_window(options.window, total);
  Checkpoints written;
  if (is_sparse) {
    const PrefillConfig of_layer = settings->of_layer(options.layer);
    reserve(key, total, of_layer.memory_size());
    written = new_checkpoints(of_layer, past, length);
  } else {
    reserve(key, 0, 0);
  }
  const auto position = at::empty({2}, at::kLong);
  position.mutable_data_ptr<int64_t>()[0] = past;
  position.mutable_data_ptr<int64_t>()[1] = last_chunk_begin_;
  PrefillBuffers buffers{key, value, scores_, memory_, errors_};
  at::Tensor out;
  try {
    out = prefill_attention_(query, {}, {}, buffers, position, options, written);
  } catch (const c10::ValueError&) {
    throw;  // before anything changed
  } catch (...) {
    failed_ = is_sparse;
    throw;
  }
  if (!key_.defined()) length_ = total;
  if (!is_sparse) return out;
  scored_ = total;
  last_chunk_begin_ = settings->last_chunk_begin(past, length);
  keep(written, past, settings->chunk_size);
  return out;
}

Checkpoints LayerState::new_checkpoints(const PrefillConfig& settings, int64_t past,
                                        int64_t length) const {
  const int64_t count = length / settings.chunk_size;
  const bool follows = past == 0 || checkpoints_.contains(past);
  // What follows a dense tail depends on where its call ended.
  if (!keeps_checkpoints_ || settings.dense_tail > 0 || count == 0 || !follows) return {};
  const StateGuard guard;
  const auto like = [&](const at::Tensor& x, int64_t fields) {
    return at::empty({count, x.size(0), x.size(1), fields}, x.options());
  };
  const int64_t size = settings.memory_size();
  return {.memory = like(memory_, size),
          .scores = like(scores_, size),
          .errors = like(errors_, kErrorFields)};
}

void LayerState::keep(const Checkpoints& written, int64_t past, int64_t chunk_size) {
  if (!written.memory.defined()) return;
  const StateGuard guard;
  const int64_t width = written.memory.ge(0).sum(-1).max().item<int64_t>();
  for (int64_t i = 0; i < written.memory.size(0); ++i) {
    checkpoints_.insert_or_assign(
        past + (i + 1) * chunk_size,
        Checkpoints{.memory = packed(written.memory[i].narrow(2, 0, width)),
                    .scores = packed(written.scores[i].narrow(2, 0, width)),
                    .errors = packed(written.errors[i])});
  }
}

Checkpoints LayerState::checkpoint(const PrefillConfig& settings) const {
  const StateGuard guard;
  TORCH_CHECK_VALUE(has_scores(), "a checkpoint needs a state with scores");
  const auto memory = next_memory({scores(), memory_, last_chunk_begin_, errors_}, settings);
  return {.memory = memory, .scores = scores_of_sets(scores_, memory), .errors = errors_.clone()};
}

void LayerState::keep_checkpoint(const PrefillConfig& settings) {
  checkpoints_.insert_or_assign(scored_, checkpoint(settings));
}

c10::intrusive_ptr<LayerState> LayerState::at_checkpoint(int64_t length,
                                                         const Checkpoints& checkpoint) {
  check_between("length", length, 1, kMostTokens);
  const StateGuard guard;
  const auto& [memory, scores, errors] = checkpoint;
  check_dims("scores", scores, 3);
  auto all = at::zeros({scores.size(0), scores.size(1), length}, scores.options());
  accumulate_scores_(all, memory, scores);
  auto state = c10::make_intrusive<LayerState>();
  state->set_scores({all, memory, /*last_chunk_begin=*/length, errors});
  state->length_ = length;
  return state;
}

void LayerState::set_scores(const PrefillState& state) {
  const auto& [scores, memory, last_chunk_begin, errors] = state;
  check_dims("scores", scores, 3);
  check_score_type("scores", scores);
  check_memory_sets("memory", memory, scores, scores.size(2));
  check_between("last_chunk_begin", last_chunk_begin, 0, scores.size(2));
  if (errors.defined()) check_errors(errors, scores);
  const StateGuard guard;
  errors_ = errors.defined() ? packed(errors) : no_errors(scores);
  scores_ = packed(scores);
  memory_ = packed(memory);
  scored_ = scores.size(2);
  last_chunk_begin_ = last_chunk_begin;
  failed_ = false;
  std::erase_if(checkpoints_, [&](const auto& kept) {
    const at::Tensor& x = kept.second.scores;
    return kept.first > scored_ || x.size(0) != scores_.size(0) || x.size(1) != scores_.size(1) ||
           x.size(2) > memory_.size(2) || x.scalar_type() != scores_.scalar_type();
  });
}

PrefillState LayerState::prefill_state() const {
  if (!has_scores()) return {};
  const StateGuard guard;
  return {packed(scores()), packed(memory_), last_chunk_begin_, packed(errors_)};
}

void LayerState::truncate(int64_t length) {
  check_at_least("length", length, 0);
  length_ = std::min(length_, length);
  const auto checkpoint = checkpoints_.find(length);
  const bool is_exact = length == 0 || checkpoint != checkpoints_.end();
  if (length >= scored_ && !(failed_ && is_exact)) return;
  const StateGuard guard;
  // Positions after the cut, and at a checkpoint all outside of its memory set, are forgotten.
  const int64_t begin = is_exact ? 0 : length;
  scores_.narrow(2, begin, scores_.size(2) - begin).zero_();
  if (length == 0) {
    memory_.fill_(-1);
    errors_.zero_();
    last_chunk_begin_ = 0;
  } else if (is_exact) {
    const auto& [memory, scores, errors] = checkpoint->second;
    accumulate_scores_(scores_, memory, scores);
    memory_.fill_(-1);
    memory_.narrow(2, 0, memory.size(2)).copy_(memory);
    errors_.copy_(errors);
    last_chunk_begin_ = length;
  } else if (length <= last_chunk_begin_) {
    memory_.fill_(-1);
    last_chunk_begin_ = 0;
  } else {
    // A set that was built for the chunk after the last one holds positions of the last one.
    memory_.masked_fill_(memory_.ge(length), -1);
  }
  failed_ = failed_ && !is_exact;
  scored_ = length;
  checkpoints_.erase(checkpoints_.upper_bound(length), checkpoints_.end());
}

int64_t LayerState::checkpoint_before(int64_t length) const {
  check_at_least("length", length, 0);
  if (length >= scored_ && !failed_) return length;
  const auto after = checkpoints_.upper_bound(length);
  return after == checkpoints_.begin() ? 0 : std::prev(after)->first;
}

template <typename Change>
void LayerState::map(const Change& change) {
  const StateGuard guard;
  for (at::Tensor* x : {&key_, &value_, &scores_, &memory_, &errors_}) {
    if (x->defined()) *x = change(*x);
  }
  for (auto& [length, x] : checkpoints_) x = mapped(x, change);
}

void LayerState::select(const at::Tensor& rows) {
  map([&](const at::Tensor& x) { return x.index_select(0, rows.to(x.device())); });
  owns_keys_ = true;
}

void LayerState::repeat(int64_t repeats) {
  map([&](const at::Tensor& x) { return x.repeat_interleave(repeats, 0); });
  owns_keys_ = true;
}

void LayerState::to(const at::Device& device) {
  map([&](const at::Tensor& x) { return x.to(device); });
}

c10::intrusive_ptr<LayerState> LayerState::clone() const {
  auto copy = c10::make_intrusive<LayerState>(*this);
  copy->map([](const at::Tensor& x) { return x.clone(); });
  copy->owns_keys_ = true;
  return copy;
}

}  // namespace h2o_prefill
