// What the CUDA operators share: which problems have kernels, tensors as kernels read them,
// launches on the current stream.
//
// No operator reads a value back from the device: none waits for it, and all can be captured into a
// CUDA graph. So positions in tensors on the device are not checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/column_sums.h"

namespace h2o_prefill {

// Whether attention with these queries and values has a kernel: float32, bfloat16 or float16, head
// dims that are multiples of 8 up to 256. The composite versions serve the rest.
bool has_attention_kernel(const at::Tensor& q, const at::Tensor& v);

// The tensor itself if each of its rows is contiguous and begins at a multiple of 16 bytes, else a
// contiguous copy.
at::Tensor with_aligned_rows(const at::Tensor& t);

// Parameters of a forward pass of all rows of q over k and v (with aligned rows) into out and lse,
// causal over everything before; callers set what differs.
AttendForwardParams forward_params(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& out, const at::Tensor& lse, double scale);

// Parameters of the column sums that belong to a forward pass, over its rows and keys.
ColumnSumsParams column_sums_params(const AttendForwardParams& forward, float* sums,
                                    int64_t sums_stride);

// Launch on the current stream. Throw what CUDA reports. workspace: undefined at first, kept by the
// caller from pass to pass; it grows as needed.
void run(const AttendForwardParams& params);
void run(ColumnSumsParams params, at::Tensor& workspace, const at::Tensor& like);

}  // namespace h2o_prefill
