// The rows in which errors are measured, and how errors widen memory sets: the same for CPU and
// CUDA kernels.
#pragma once

#include <cstdint>

#include "h2o_prefill/error_fields.h"
#include "kernels/key_sets.h"

namespace h2o_prefill {

// Row i of the `count` rows of a chunk in which errors are measured, counted from the chunk's
// first: a hashed one of each of `count` equal parts, since fixed strides coincide with recall
// blocks. The hash is the finaliser of SplitMix64. count <= rows.count.
H2O_HOST_DEVICE int64_t error_row(const RowRange& rows, int64_t count, int64_t i) {
  const int64_t begin = rows.count * i / count;
  const int64_t end = rows.count * (i + 1) / count;
  auto hash = static_cast<uint64_t>(rows.position() + begin) + 0x9E3779B97F4A7C15U;
  hash = (hash ^ (hash >> 30U)) * 0xBF58476D1CE4E5B9U;
  hash = (hash ^ (hash >> 27U)) * 0x94D049BB133111EBU;
  hash ^= hash >> 31U;
  return begin + static_cast<int64_t>(hash % static_cast<uint64_t>(end - begin));
}

// The rows of a call in which errors are measured, rising: up to `count` of each chunk that has a
// history.
struct MeasuredRows {
  int64_t length;  // rows of the call
  int64_t past;
  int64_t chunk_size;
  int64_t count;

  H2O_HOST_DEVICE RowRange chunk(int64_t i) const {
    const int64_t begin = i * chunk_size;
    return {begin, chunk_size < length - begin ? chunk_size : length - begin, past};
  }
  H2O_HOST_DEVICE int64_t count_of(const RowRange& chunk) const {
    return count < chunk.count ? count : chunk.count;
  }
  // How many are before a chunk.
  H2O_HOST_DEVICE int64_t before(int64_t i) const {
    const int64_t chunks = past > 0 ? i : i - 1;
    return chunks > 0 ? chunks * count_of(chunk(0)) : 0;
  }
  H2O_HOST_DEVICE int64_t size() const {
    if (length == 0) return 0;
    const int64_t last = (length - 1) / chunk_size;
    return before(last) + (past > 0 || last > 0 ? count_of(chunk(last)) : 0);
  }
  // Row i of them, of the call.
  H2O_HOST_DEVICE int64_t row(int64_t i) const {
    const int64_t of_chunk = count_of(chunk(0));
    const RowRange rows = chunk(i / of_chunk + (past > 0 ? 0 : 1));
    return rows.begin + error_row(rows, count_of(rows), i % of_chunk);
  }
};

// How errors widen the memory sets of a head.
struct WideningRule {
  double threshold;  // of an error that doubles L and H
  int64_t most_doublings;

  // Adds a chunk's error to an entry of LayerState::errors.
  H2O_HOST_DEVICE void record(float* entry, double error) const {
    entry[kFactorSum] += __builtin_exp2f(entry[kDoublings]);
    if (error > threshold && entry[kDoublings] < static_cast<float>(most_doublings)) {
      entry[kDoublings] += 1.0F;
    }
    entry[kErrorSum] += static_cast<float>(error);
    entry[kErrorCount] += 1.0F;
  }
  // The factor of L and H, besides a head's own.
  H2O_HOST_DEVICE int64_t factor(const float* entry) const {
    const auto doublings = static_cast<int64_t>(entry[kDoublings]);
    return int64_t{1} << (doublings < 0                ? 0
                          : doublings < most_doublings ? doublings
                                                       : most_doublings);
  }
};

}  // namespace h2o_prefill
