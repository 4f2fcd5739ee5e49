// Counters and settings for tests of the emulation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cuda_emulation {

// 8x8 matrices that ldmatrix has read with a bank conflict: two of the 8 rows of 16 bytes lay in
// the same group of 4 banks.
inline int64_t ldmatrix_conflicts = 0;

// Threads of the last launch that have waited for earlier launches. Relaxed: counting orders
// nothing, which would hide races.
inline std::atomic<size_t> threads_that_waited = 0;

// The most shared memory that a block may have. As it is, the limit of 8.6, 8.9 and 12.0, which
// every architecture from sm_80 has; kernels for 9.0 alone are run with 227 KB.
constexpr size_t kMaxSharedBytes = 99 * 1024;
constexpr size_t kMaxSharedBytesOfHopper = 227 * 1024;
inline size_t max_shared_bytes = kMaxSharedBytes;

}  // namespace cuda_emulation
