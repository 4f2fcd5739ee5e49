#include "common/checkpoint.h"

#include "h2o_prefill/ops.h"

namespace h2o_prefill {

at::Tensor scores_of_sets(const at::Tensor& scores, const at::Tensor& memory) {
  return gather_rows(scores.unsqueeze(3), memory).squeeze(3);
}

Checkpoint checkpoint_of(const StateBuffers& state, int64_t length, int64_t last_chunk_begin) {
  const auto chunk = state.scores.narrow(2, last_chunk_begin, length - last_chunk_begin);
  return {.memory = state.memory.clone(),
          .scores = scores_of_sets(state.scores, state.memory),
          .errors = state.errors.clone(),
          .last_chunk_begin = last_chunk_begin,
          .chunk_scores = chunk.clone(at::MemoryFormat::Contiguous)};
}

void restore_(StateBuffers& state, int64_t length, const Checkpoint& checkpoint) {
  state.scores.zero_();
  accumulate_scores_(state.scores, checkpoint.memory, checkpoint.scores);
  if (checkpoint.chunk_scores.defined()) {
    const int64_t begin = checkpoint.last_chunk_begin;
    state.scores.narrow(2, begin, length - begin).copy_(checkpoint.chunk_scores);
  }
  state.memory.copy_(checkpoint.memory);
  state.errors.copy_(checkpoint.errors);
}

int64_t cut_(StateBuffers& state, int64_t length, int64_t all, int64_t last_chunk_begin) {
  state.scores.narrow(2, length, all - length).zero_();
  if (length <= last_chunk_begin) {
    state.memory.fill_(-1);
    return 0;
  }
  // A set that was built for the chunk after the last one holds positions of the last one.
  state.memory.masked_fill_(state.memory.ge(length), -1);
  return last_chunk_begin;
}

}  // namespace h2o_prefill
