#include "common/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "h2o_prefill/ops.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace h2o_prefill {

namespace {

// Requests huge pages for a large CPU tensor that is about to be written in full: one page fault
// for 2 MiB instead of 512, which take 3 times as long. Has no effect where the system has none.
void advise_huge_pages([[maybe_unused]] const at::Tensor& t) {
#ifdef __linux__
  // Smaller tensors often reuse freed memory, whose pages are mapped already.
  constexpr int64_t kLeastAdvisedBytes = int64_t{32} << 20;
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (!t.is_cpu() || static_cast<int64_t>(t.nbytes()) < kLeastAdvisedBytes) return;
  const auto first = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t begin = round_up(first, kHugePage);
  const uintptr_t end = (first + t.nbytes()) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::ScalarType accumulate_type(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

HeadsView heads_view(const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_INTERNAL_ASSERT(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
  const DType dtype = type == at::kFloat
                          ? DType::kFloat32
                          : (type == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat16);
  return {t.data_ptr(), dtype,       t.size(0),   t.size(1),  t.size(2),
          t.size(3),    t.stride(0), t.stride(1), t.stride(2)};
}

at::Tensor empty_heads(int64_t batch, int64_t heads, int64_t length, int64_t dim,
                       const at::Tensor& like) {
  const auto out = at::empty({batch, length, heads, dim}, like.options());
  advise_huge_pages(out);
  return out.transpose(1, 2);
}

at::Tensor no_errors(const at::Tensor& key) {
  return at::zeros({key.size(0), key.size(1), kErrorFields}, key.options().dtype(at::kFloat));
}

}  // namespace h2o_prefill
