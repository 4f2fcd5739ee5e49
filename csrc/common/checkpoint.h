// Removing the last tokens of a layer's state: exactly at a checkpoint, else as far as possible.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <map>

namespace h2o_prefill {

// What the calls after some tokens need of a layer's state: the candidates for the next memory set,
// with their scores. Those are the positions of `memory` and the tokens since last_chunk_begin.
struct Checkpoint {
  at::Tensor memory;             // int32 [B, Hkv, M], ascending, then -1
  at::Tensor scores;             // [B, Hkv, M], 0 where memory is -1
  at::Tensor errors;             // fp32 [B, Hkv, kErrorFields]
  int64_t last_chunk_begin = 0;  // number of tokens, if the next memory set is known already
  at::Tensor chunk_scores = {};  // [B, Hkv, tokens - last_chunk_begin]; undefined: none
};

// The buffers of a layer's state.
struct StateBuffers {
  at::Tensor scores;  // [B, Hkv, capacity]
  at::Tensor memory;
  at::Tensor errors;
};

// The last of the lengths at which checkpoints are kept, up to this one; 0 if there is none.
template <typename T>
int64_t checkpoint_before(const std::map<int64_t, T>& kept, int64_t length) {
  const auto after = kept.upper_bound(length);
  return after == kept.begin() ? 0 : std::prev(after)->first;
}

// Scores [B, Hkv, any] of the positions of memory sets [B, Hkv, M]; 0 where those are -1.
at::Tensor scores_of_sets(const at::Tensor& scores, const at::Tensor& memory);

// A copy of the state after `length` tokens.
Checkpoint checkpoint_of(const StateBuffers& state, int64_t length, int64_t last_chunk_begin);

// Makes the state the one of `length` tokens that a checkpoint was taken of.
void restore_(StateBuffers& state, int64_t length, const Checkpoint& checkpoint);

// Removes the tokens after the first `length` of `all`. Scores of the others stay: the share of
// removed queries cannot be separated. A cut before the last chunk empties the memory set, so that
// every remaining token is a candidate again. Returns last_chunk_begin.
int64_t cut_(StateBuffers& state, int64_t length, int64_t all, int64_t last_chunk_begin);

}  // namespace h2o_prefill
