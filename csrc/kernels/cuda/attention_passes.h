// The passes that attention on CUDA is made of: their parameters from tensors, and their launches.
//
// No operator reads a value back from the device: none waits for it, and all can be captured into a
// CUDA graph. So positions in tensors on the device are not checked; kernels leave out positions
// outside of the history.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/attention.h"
#include "kernels/cuda/column_sums_grid.h"
#include "kernels/cuda/cuda_kernels.h"

namespace h2o_prefill {

// Whether attention with these arguments has a kernel: float32, bfloat16 or float16, head dims that
// are multiples of 8 up to 256. The composite versions serve the rest.
bool has_attention_kernel(const AttentionArguments& x);

// The tensor itself if each of its rows is contiguous and begins at a multiple of 16 bytes, else a
// contiguous copy.
at::Tensor with_aligned_rows(const at::Tensor& t);

// As GatherPages.
at::Tensor gather_pages_cuda(const at::Tensor& pages, const at::Tensor& table, int64_t total);

// Common to all passes of a call, for all its rows; the last one stands at the last key.
// x: with aligned rows; lse [B, Hq, Tq] may be undefined if no pass wants or merges it.
AttendForwardParams attention_call(const AttentionArguments& x, const at::Tensor& out,
                                   const at::Tensor& lse);

// Phase 1: all rows attend causally inside their chunks of chunk_size rows.
AttendForwardParams chunk_pass(const AttendForwardParams& call, int64_t chunk_size);

// Phase 2: rows attend to the memory sets.
AttendForwardParams memory_pass(const AttendForwardParams& call, const RowRange& rows,
                                const MemorySetView& sets);

// Dense attention: rows attend to every key up to themselves, or to the last `window` of these.
AttendForwardParams dense_pass(const AttendForwardParams& call, const RowRange& rows,
                               int64_t window = CausalRange::kNoWindow);

// Column sums of a pass with the lse over its keys: of a chunk_pass(), element [b, h, p] of [B,
// Hkv, stride] for the key at position p; of a memory_pass(), one for each member.
ColumnSumsParams column_sums_pass(const AttendForwardParams& pass, const float* lse, float* sums,
                                  int64_t stride);

// Launches passes on the current stream of the current device. Throws CUDA's errors.
class AttentionStream {
 public:
  // like: a tensor on the device.
  explicit AttentionStream(const at::Tensor& like);

  void attend(const AttendForwardParams& pass) const;
  // Until the next call, the result has the parts of the sums that scatter_add leaves.
  column_sums::Grid sum_columns(const ColumnSumsParams& pass);

 private:
  const CudaKernels& kernels_;
  c10::cuda::CUDAStream stream_;
  at::TensorOptions float_options_;
  at::Tensor workspace_;  // grows as passes need it
};

// Into how many parts of at least so many keys to cut the keys of one prompt, so that its rows fill
// the GPU; 1 for several prompts.
int64_t parts_of_keys(const AttentionArguments& x, int64_t least_keys);

// Row t attends to keys [0, limits[t]), int32 as AttendForwardParams has them. The parts of the
// keys of one prompt are the batch rows of one launch, whose results are merged.
at::Tensor attend_in_parts(const AttentionArguments& x, const at::Tensor& limits, int64_t parts);

}  // namespace h2o_prefill
