// Linear attention of a few tokens, as a decoding step has them. Compiled once per instruction set.
#pragma once

#include "kernels/cpu/linear_chunk.h"

namespace h2o_prefill::H2O_ISA {

// See LinearKernels.
void linear_tokens(const LinearChunkArgs& args, const LinearStates& states);
int64_t token_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t heads);

}  // namespace h2o_prefill::H2O_ISA
