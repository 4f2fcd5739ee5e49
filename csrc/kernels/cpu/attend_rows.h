// The inner part of every CPU attention kernel: rows of one query head against packed key sets.
//
// It is compiled once per instruction set (attend_rows.cpp); cpu_kernels() names the copy that this
// CPU runs.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/linear_chunk.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/params.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill {

// Rows of a [*, dim] tensor to be packed: row i is `positions[i]`, or `i` where positions is null.
struct PackArgs {
  const void* data;
  DType dtype;
  int64_t stride_row;  // in elements
  const int32_t* positions;
  int64_t count;  // rows of the whole set
  // Rows [begin, end) of it are packed by this call: multiples of the panel, but the last end is
  // `count`.
  int64_t begin;
  int64_t end;
  int64_t dim;
  float* packed;  // the whole set's
};

// Packs a whole set in one call.
H2O_INLINE PackArgs pack_whole(const void* data, DType dtype, int64_t stride_row,
                               const int32_t* positions, int64_t count, int64_t dim,
                               float* packed) {
  return {data, dtype, stride_row, positions, count, /*begin=*/0, /*end=*/count, dim, packed};
}

// Keys and values in packed form.
struct KeySet {
  const float* keys;    // written by pack_keys
  const float* values;  // written by pack_values
  int64_t count;        // keys of the set
  // Row r sees keys [begins[r], limits[r]), neither falling with r; null: from the first, to the
  // last one.
  const int32_t* limits = nullptr;
  // fp32 [padded(count)], added to: sum over rows of the softmax over this set; null: not wanted.
  float* colsum = nullptr;
  const int32_t* begins = nullptr;
};

// c[m, n] = a[m, k] b[k, n], or added to c; a and b bfloat16, c float32. Row strides in elements; b
// lies as [k / 2][n][2].
using BFloat16Gemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                              int64_t ldc, bool add, const void* a, const void* b, float* c);

struct AttendRowsArgs {
  const void* query;  // first row; head_dim elements each
  void* out;          // first row; value_dim elements each
  float* lse;         // natural log, one a row; where there is an earlier result, its own at first
  DType dtype;        // of the query and of packed keys
  DType out_dtype;
  int64_t query_stride;  // in elements
  int64_t out_stride;
  // The rows' result over other sets, fp32, to merge with: value_dim elements each, may be `out`;
  // null: none.
  const float* earlier = nullptr;
  int64_t earlier_stride = 0;
  int64_t rows;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  float sink = kNegInf;  // a further logit of the denominator, natural, not capped; -inf: none
  float softcap = 0.0F;  // logits z become softcap tanh(z / softcap); 0: they do not
  const KeySet* sets;    // a row's result is the softmax over all that it sees in all sets
  int num_sets;
  BFloat16Gemm gemm;  // multiplies words of bfloat16 instead of the kernel's own tiles; may be null
  float* scratch;     // scratch_floats(...) floats, of one thread
};

// One row of all heads of a group, and keys as they lie in a tensor.
struct AttendTokenArgs {
  const void* query;  // of the first head, the others query_stride elements after each other
  const void* keys;   // first visible row
  const void* values;
  DType dtype;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t heads;
  int64_t count;  // keys, at least 1
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  float softcap;   // as of AttendRowsArgs
  float* m;        // [heads], the highest logit in base 2
  float* l;        // [heads], the sum of exp2(logit - m)
  float* out;      // [heads, value_dim], numerators
  float* scratch;  // scratch_floats() floats

  static constexpr int kHeads = 4;         // at most, of a pass
  static constexpr int kWidestPanel = 32;  // keys of a panel, at most

  static int64_t scratch_floats(int64_t head_dim, int64_t count) {
    return kHeads * (head_dim + count + 2 * kWidestPanel);
  }
};

struct CpuKernels {
  const char* isa;
  int64_t panel;  // keys are padded to a multiple of this
  // Whether bfloat16 inputs are multiplied as such: packed rows are half as long.
  bool bfloat16_products;
  BFloat16Gemm gemm;       // for AttendRowsArgs; null: the tiles of attend_rows
  void (*gemm_release)();  // after the last product of a thread's task; null as `gemm`
  // Padding that is multiplied is 0.
  void (*pack_keys)(const PackArgs&);
  void (*pack_values)(const PackArgs&);
  void (*attend_rows)(const AttendRowsArgs&);
  void (*attend_token)(const AttendTokenArgs&);
  // Floats that attend_rows needs for sets of at most max_count keys.
  int64_t (*scratch_floats)(int64_t head_dim, int64_t value_dim, int64_t max_count);
  const LinearKernels* linear;
  const PackedLinearKernels* packed_linear;

  int64_t padded(int64_t n) const { return (n + panel - 1) / panel * panel; }
  int64_t elements_per_word(DType dtype) const {
    return bfloat16_products && dtype == DType::kBFloat16 ? 2 : 1;
  }
  int64_t packed_key_floats(int64_t count, int64_t head_dim, DType dtype) const {
    const int64_t elements = elements_per_word(dtype);
    return padded(count) * ((head_dim + elements - 1) / elements);
  }
  int64_t packed_value_floats(int64_t count, int64_t value_dim, DType dtype) const {
    return padded(count) / elements_per_word(dtype) * padded(value_dim);
  }
};

// The fastest that this CPU runs, or the one that H2O_PREFILL_ISA names. Chosen once.
// Throws std::runtime_error if the variable names one that is unknown, not compiled in, or not
// there.
const CpuKernels& cpu_kernels();

}  // namespace h2o_prefill
