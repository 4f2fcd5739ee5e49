// The chunks of one call: where each begins and ends, in absolute positions.
//
// For programs that run the method step by step with the operators of single chunks and a
// MemorySetTracker. The operators for whole calls step through their chunks themselves, so the
// library does not use this class.
#pragma once

#include <torch/custom_class.h>

#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Chunk c of a call with `num_tokens` new tokens after `past` earlier ones covers positions
// [past + c S, min(past + (c + 1) S, past + num_tokens)). A call always starts a new chunk.
class H2O_API ChunkManager : public torch::CustomClassHolder {
 public:
  // Throws if past or num_tokens is negative or their sum above 2^31 - 1, or chunk_size below 1.
  ChunkManager(int64_t past, int64_t num_tokens, int64_t chunk_size);

  int64_t past() const { return past_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t chunk_size() const { return chunk_size_; }
  int64_t num_chunks() const;

  // First position of the chunk, and the one after its last. Throws if there is no such chunk.
  int64_t begin(int64_t chunk) const;
  int64_t end(int64_t chunk) const;

  // Where the last chunk begins; `past` for a call without tokens.
  int64_t last_chunk_begin() const;

 private:
  int64_t past_;
  int64_t num_tokens_;
  int64_t chunk_size_;
};

}  // namespace h2o_prefill
