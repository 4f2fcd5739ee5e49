// Matrix products of bfloat16 by Intel AMX, through PyTorch's own oneDNN.
#pragma once

#include <cstdint>

namespace h2o_prefill {

// Whether this CPU has AMX, the kernel lets the process use it, and PyTorch was built for it.
bool amx_available();

// Whether oneDNN, which has these products, is enabled (torch.backends.mkldnn.enabled).
bool amx_enabled();

// A BFloat16Gemm (attend_rows.h). Leaves the tile registers configured until amx_release().
void amx_gemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
              const void* a, const void* b, float* c);

// Gives up the tile registers of this thread.
void amx_release();

}  // namespace h2o_prefill
