#include "kernels/cuda/error_rows.cuh"

#include <algorithm>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {

cudaError_t launch_list_measured(const ListMeasuredParams& params, cudaStream_t stream) {
  const int64_t numbers = std::max(params.heads * params.measured.size(), params.room);
  const int64_t blocks = divide_up<int64_t>(numbers, error_rows::kListThreads);
  return launch(&error_rows::list_measured_kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(error_rows::kListThreads), 0, stream, params);
}

cudaError_t launch_record_errors(const RecordErrorsParams& params, cudaStream_t stream) {
  const auto with = [&](auto dtype) {
    return launch(&error_rows::record_errors_kernel<dtype()>,
                  dim3(static_cast<unsigned>(params.out.batch * params.kv_heads)),
                  dim3(error_rows::kThreads), error_rows::kSharedBytes, stream, params,
                  /*overlapped=*/true);
  };
  if (params.out.dtype == DType::kFloat32) return with(DTypeConstant<DType::kFloat32>());
  return with_half_dtype(params.out.dtype, with);
}

}  // namespace h2o_prefill
