// The inner part of linear layers whose weights have 16 or 8 bits: products in float32.
//
// Weights lie in panels of 16 outputs: [inputs][16] of float16 or int8. Of bfloat16, two inputs lie
// together, [inputs / 2][16][2]: a shift or a mask converts them. It is compiled once per
// instruction set (packed_linear.cpp), like attend_rows.h.
#pragma once

#include <cstdint>

namespace h2o_prefill {

enum class PanelType : int32_t { kBFloat16, kFloat16, kInt8 };

struct PackedLinearArgs {
  static constexpr int64_t kFewTokens = 6;  // of multiply_few, at most
  // Of multiply_many, at most, and the outputs that it computes together.
  static constexpr int64_t kBlockTokens = 512;
  static constexpr int64_t kBlockOutputs = 256;
  static constexpr int64_t kTileOutputs = 32;
  static constexpr int64_t kScratchFloats = (kBlockOutputs + 128) * 320;

  const float* x;  // [tokens, inputs]
  int64_t tokens;
  int64_t inputs;  // even
  const void* panels;
  int64_t num_panels;
  PanelType type;
  const float* scales;  // one an output of all panels; null: 1
  const float* bias;    // one an output of all tiles; null: 0
  float* out;           // [tokens, out_stride]
  int64_t out_stride;   // the outputs of all tiles, or more
};

struct PackedLinearKernels {
  // Panels [begin, end) of few tokens: weights are converted in registers.
  void (*multiply_few)(const PackedLinearArgs&, int64_t begin, int64_t end);
  // Outputs [begin, end), whole tiles: weights are converted once for all tokens. scratch:
  // kScratchFloats, of one thread, whole cache lines.
  void (*multiply_many)(const PackedLinearArgs&, int64_t begin, int64_t end, float* scratch);
  // Panels [begin, end) of bfloat16, or of int8 and scaled, as bfloat16 [outputs, inputs].
  void (*unpack)(const PackedLinearArgs&, int64_t begin, int64_t end, uint16_t* weights);
};

}  // namespace h2o_prefill
