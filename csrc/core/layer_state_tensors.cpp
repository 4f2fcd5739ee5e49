// The pickled form of a LayerState.
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "common/checks.h"
#include "common/memory_sets.h"
#include "common/rules.h"
#include "core/state_header.h"
#include "h2o_prefill/layer_state.h"

namespace h2o_prefill {
namespace {

// The header of the pickled form: these, then length and width of each checkpoint.
struct Header {
  enum : uint8_t {
    kLength,
    kScored,
    kLastChunkBegin,
    kInitialCapacity,
    kMaxCapacity,
    kHasKeys,
    kKeepsCheckpoints,
    kFields
  };
};

}  // namespace

std::vector<at::Tensor> LayerState::tensors(bool copies) const {
  const StateGuard guard;
  std::vector<int64_t> header(Header::kFields);
  header[Header::kLength] = length_;
  header[Header::kScored] = scored_;
  header[Header::kLastChunkBegin] = last_chunk_begin_;
  header[Header::kInitialCapacity] = copies ? initial_capacity_ : kInitialCapacity;
  header[Header::kMaxCapacity] = copies ? max_capacity_ : kMostTokens;
  header[Header::kHasKeys] = key_.defined();
  header[Header::kKeepsCheckpoints] = keeps_checkpoints_;
  std::vector<at::Tensor> tensors(1);
  if (key_.defined()) tensors.insert(tensors.end(), {key(), value()});
  if (has_scores()) {
    tensors.insert(tensors.end(), {scores(), memory_, errors_});
  }
  if (copies) std::transform(tensors.begin() + 1, tensors.end(), tensors.begin() + 1, packed);
  std::vector<at::Tensor> memory, scores, errors;
  for (const auto& [length, x] : checkpoints_) {
    header.insert(header.end(), {length, x.memory.size(2)});
    memory.push_back(x.memory);
    scores.push_back(x.scores);
    errors.push_back(x.errors);
  }
  if (!memory.empty()) {
    tensors.insert(tensors.end(), {at::cat(memory, 2), at::cat(scores, 2), at::cat(errors, 2)});
  }
  tensors[0] = at::tensor(header, at::kLong);
  return tensors;
}

c10::intrusive_ptr<LayerState> LayerState::from_tensors(const std::vector<at::Tensor>& tensors) {
  StateReader read(tensors, Header::kFields, /*record_fields=*/2);
  auto state = c10::make_intrusive<LayerState>(read.field(Header::kKeepsCheckpoints) != 0,
                                               read.field(Header::kInitialCapacity),
                                               read.field(Header::kMaxCapacity));
  const StateGuard guard;
  const int64_t length = read.field(Header::kLength), scored = read.field(Header::kScored);
  check_between("length", length, 0, kMostTokens);
  if (read.field(Header::kHasKeys) != 0) {
    const auto of_tokens = read.take(2, "key and value");
    state->set_keys(of_tokens[0], of_tokens[1]);
    check_size("key", of_tokens[0], 2, length, "the length");
  }
  state->length_ = length;
  if (scored != 0) {
    const auto sparse = read.take(3, "scores, memory and errors");
    state->set_scores({sparse[0], sparse[1], read.field(Header::kLastChunkBegin), sparse[2]});
    check_size("scores", sparse[0], 2, scored, "the tokens that have scores");
  }
  if (read.num_records() > 0) {
    const auto all = read.take(3, "checkpoints");
    TORCH_CHECK_VALUE(state->has_scores(), "checkpoints must come with scores, got none");
    check_per_kv_head("checkpoint_memory", all[0], state->scores_, at::kInt, "scores");
    check_per_kv_head("checkpoint_scores", all[1], state->scores_, state->scores_.scalar_type(),
                      "scores");
    check_per_kv_head("checkpoint_errors", all[2], state->scores_, at::kFloat, "scores");
    for (int64_t i = 0, begin = 0; i < read.num_records(); ++i) {
      const int64_t tokens = read.record(i, 0), width = read.record(i, 1);
      check_between("the tokens of a checkpoint", tokens, 1, scored);
      check_between("the width of a checkpoint", width, 0, state->memory_.size(2));
      const auto part = [&](size_t tensor, int64_t first, int64_t count) {
        check_at_most("the width of all checkpoints", first + count, all[tensor].size(2));
        return packed(all[tensor].narrow(2, first, count));
      };
      const Checkpoints one{.memory = part(0, begin, width),
                            .scores = part(1, begin, width),
                            .errors = part(2, i * kErrorFields, kErrorFields)};
      check_memory_sets("checkpoint_memory", one.memory, state->scores_, tokens);
      check_errors(one.errors, state->scores_);
      state->checkpoints_[tokens] = one;
      begin += width;
    }
  }
  read.check_end();
  return state;
}

}  // namespace h2o_prefill
