// What comes between the attention of a chunk and the next chunk on the GPU, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/column_sums_grid.h"
#include "kernels/cuda/error_rows.h"
#include "kernels/cuda/select_memory.h"

namespace h2o_prefill {

// For each unit, in this order, and each if its result is not null: the column sums over its memory
// set are added up from their parts and to scores, its error is recorded, and its memory set for
// the next chunk is selected, by these scores and errors.
struct ChunkEndParams {
  int64_t units;                   // batch rows times KV heads
  column_sums::Grid sums = {};     // into sums.params.sums, with scatter_add
  RecordErrorsParams errors = {};  // into errors.errors
  SelectMemoryParams select = {};  // into select.selected
};

cudaError_t launch_chunk_end(const ChunkEndParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
