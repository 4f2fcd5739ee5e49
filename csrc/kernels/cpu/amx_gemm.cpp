#include "kernels/cpu/amx_gemm.h"

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

namespace h2o_prefill {

bool amx_available() {
  return at::native::cpublas::could_pack(at::kBFloat16) && at::cpu::init_amx();
}

bool amx_enabled() { return at::globalContext().userEnabledMkldnn(); }

void amx_gemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
              const void* a, const void* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, static_cast<const at::BFloat16*>(a),
                              static_cast<const at::BFloat16*>(b), c);
}

void amx_release() { at::native::cpublas::brgemm_release(); }

}  // namespace h2o_prefill
