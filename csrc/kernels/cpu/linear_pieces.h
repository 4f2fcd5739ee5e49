// How linear attention on CPUs is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/tasks.h"

namespace h2o_prefill {

// The tokens of a KV head are cut into pieces of whole chunks, so that few heads still make enough
// tasks for many threads. Pieces do not depend on the number of threads, since they decide how
// results are rounded.
struct LinearPieces {
  int64_t length;  // tokens of a head
  int64_t chunk;   // tokens
  int64_t chunks;  // in a piece
  int64_t count;   // pieces of a head

  // units: KV heads of all batch rows. state_floats: size of a piece's state.
  LinearPieces(int64_t units, int64_t tokens, int64_t state_floats)
      : length(tokens), chunk(std::min(kChunk, tokens)) {
    const int64_t all = divide_up(length, chunk);
    const int64_t bytes = units * state_floats * static_cast<int64_t>(sizeof(float));
    const int64_t most = std::max<int64_t>(std::min(kMost / units, kStateBytes / bytes), 1);
    const int64_t wanted = divide_up(length, std::max(kTokens, chunk));
    chunks = divide_up(all, std::min(wanted, most));
    count = divide_up(all, chunks);
  }

  int64_t begin(int64_t piece) const { return piece * chunks * chunk; }
  int64_t end(int64_t piece) const { return std::min(begin(piece + 1), length); }

  // Whether tasks of whole heads take less time than tasks of pieces, which compute the share
  // `twice` of their work a second time.
  bool heads_suffice(int64_t units, int64_t threads, double twice) const {
    if (threads == 1 || count == 1) return true;
    return static_cast<double>(divide_up(units, threads)) * threads <= units * (1 + twice);
  }

 private:
  // Fewer tokens would spend more time on the states between chunks, more tokens on scores above
  // the diagonal; the caller's chunk size has no effect.
  static constexpr int64_t kChunk = 32;
  // Upper bound on the pieces of all heads, lower bound on the tokens of each, and upper bound on
  // the memory of their states.
  static constexpr int64_t kMost = 256;
  static constexpr int64_t kTokens = 1024;
  static constexpr int64_t kStateBytes = int64_t{32} << 20;
};

}  // namespace h2o_prefill
