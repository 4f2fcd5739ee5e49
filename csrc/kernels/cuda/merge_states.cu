#include "kernels/cuda/merge_states.cuh"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_grid.h"

namespace h2o_prefill {
namespace {

// Whether every row of a view begins at a multiple of 16 bytes and is one of so many.
bool aligned(const HeadsView& view) {
  const int64_t unit = 16 / size_of(view.dtype);
  return reinterpret_cast<uint64_t>(view.data) % 16 == 0 && view.dim % unit == 0 &&
         (view.batch == 1 || view.stride_batch % unit == 0) &&
         (view.heads == 1 || view.stride_head % unit == 0) &&
         (view.length == 1 || view.stride_row % unit == 0);
}

template <DType dtype>
cudaError_t launch_typed(const MergeStatesParams& params, cudaStream_t stream) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(typename merge::Element<dtype>::Stored));
  const dim3 grid =
      grid_of_rows(params.out.length, merge::kWarps, params.out.batch * params.out.heads);
  const auto kernel = aligned(params.out_a) && aligned(params.out_b) && aligned(params.out)
                          ? &merge::merge_states_kernel<dtype, kCount>
                          : &merge::merge_states_kernel<dtype, 1>;
  return launch(kernel, grid, dim3(merge::kThreads), 0, stream, params);
}

}  // namespace

cudaError_t launch_merge_states(const MergeStatesParams& params, cudaStream_t stream) {
  switch (params.out.dtype) {
    case DType::kFloat32:
      return launch_typed<DType::kFloat32>(params, stream);
    case DType::kBFloat16:
      return launch_typed<DType::kBFloat16>(params, stream);
    case DType::kFloat16:
      return launch_typed<DType::kFloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace h2o_prefill
