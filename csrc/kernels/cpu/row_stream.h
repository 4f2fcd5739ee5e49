// Prefetching of rows while products run.
#pragma once

#include "kernels/cpu/inline.h"
#include "kernels/params.h"

namespace h2o_prefill::H2O_ISA {

// Rows that lie too far apart for a hardware prefetcher. Their cache lines are prefetched while
// products run, as many at a time as keep the memory busy without delaying loads. They go to L2:
// the core can wait for more lines there than in L1.
class RowStream {
 public:
  RowStream() = default;
  // `steps`: calls of advance() over which all lines are prefetched.
  H2O_INLINE RowStream(const void* data, DType dtype, int64_t stride, int64_t rows, int64_t dim,
                       int64_t steps)
      : data_(static_cast<const char*>(data)),
        stride_(stride * size_of(dtype)),
        lines_((dim * size_of(dtype) + kLine - 1) / kLine),
        left_(rows * lines_),
        step_((left_ + steps - 1) / steps) {}

  H2O_INLINE void advance() {
    int64_t count = left_ < step_ ? left_ : step_;
    left_ -= count;
    for (; count > 0; --count) {
      __builtin_prefetch(data_ + line_ * kLine, /*rw=*/0, /*locality=*/2);
      if (++line_ == lines_) line_ = 0, data_ += stride_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const char* data_ = nullptr;
  int64_t stride_ = 0;  // bytes
  int64_t lines_ = 0;   // of a row
  int64_t left_ = 0;
  int64_t step_ = 0;
  int64_t line_ = 0;
};

}  // namespace h2o_prefill::H2O_ISA
