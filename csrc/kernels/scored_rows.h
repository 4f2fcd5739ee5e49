// The rows of a chunk whose attention counts in scores.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace h2o_prefill {

// One of each `every` consecutive rows, all of them if that is 1, counted from the chunk's first: a
// hashed one, since fixed strides coincide with recall blocks. The hash is a step of Fishman and
// Moore's generator (SIAM J. Sci. Stat. Comput. 7, 1986). It knows no positions, which a history
// that is held compactly changes.
struct ScoredRows {
  int64_t every = 1;

  // Row i of them, of numbers or of a tensor of them. The first one is row 0.
  template <typename Number>
  H2O_HOST_DEVICE Number row(const Number& i) const {
    return i * every + i * int64_t{950706376} % int64_t{INT32_MAX} % every;
  }
  H2O_HOST_DEVICE bool has(int64_t chunk_row) const { return row(chunk_row / every) == chunk_row; }
  // How many are among the first rows of a chunk.
  H2O_HOST_DEVICE int64_t count(int64_t chunk_rows) const {
    const int64_t last = chunk_rows / every;
    return last + (row(last) < chunk_rows);
  }
};

}  // namespace h2o_prefill
