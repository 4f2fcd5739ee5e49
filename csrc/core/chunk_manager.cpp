#include "h2o_prefill/chunk_manager.h"

#include <algorithm>

#include "common/rules.h"
#include "h2o_prefill/config.h"

namespace h2o_prefill {

ChunkManager::ChunkManager(int64_t past, int64_t num_tokens, int64_t chunk_size)
    : past_(past), num_tokens_(num_tokens), chunk_size_(chunk_size) {
  check_call_tokens(past, num_tokens);
  check_at_least("chunk_size", chunk_size, 1);
}

int64_t ChunkManager::num_chunks() const {
  return num_tokens_ / chunk_size_ + (num_tokens_ % chunk_size_ != 0);
}

int64_t ChunkManager::begin(int64_t chunk) const {
  check_index("chunk", chunk, num_chunks());
  return past_ + chunk * chunk_size_;
}

int64_t ChunkManager::end(int64_t chunk) const {
  const int64_t first = begin(chunk);
  return first + std::min(chunk_size_, past_ + num_tokens_ - first);
}

int64_t ChunkManager::last_chunk_begin() const {
  return PrefillConfig{.chunk_size = chunk_size_}.last_chunk_begin(past_, num_tokens_);
}

}  // namespace h2o_prefill
