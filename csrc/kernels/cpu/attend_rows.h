// The inner part of every CPU attention kernel: rows of one query head against packed key sets.
//
// It is compiled once per instruction set (attend_rows.cpp); cpu_kernels() names the copy that this
// CPU runs.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace h2o_prefill {

// Rows of a [*, dim] tensor to be packed: row i is `positions[i]`, or `i` where positions is null.
struct PackArgs {
  const void* data;
  DType dtype;
  int64_t stride_row;  // in elements
  const int32_t* positions;
  int64_t count;
  int64_t dim;
  float* packed;
};

// Keys and values in packed form.
struct KeySet {
  const float* keys;    // written by pack_keys
  const float* values;  // written by pack_values
  int64_t count;        // keys of the set
  const int32_t*
      limits;     // row r sees keys [0, limits[r]), never falling with r; null: every row sees all
  float* colsum;  // fp32 [padded_count(count)], added to: sum over rows of the softmax over this
                  // set; null: not wanted
};

struct AttendRowsArgs {
  const void* query;  // first row; head_dim elements each
  void* out;          // first row; value_dim elements each
  float* lse;         // natural log, one a row
  DType dtype;
  int64_t query_stride;  // in elements
  int64_t out_stride;
  int64_t rows;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  const KeySet* sets;  // a row's result is the softmax over all that it sees in all sets
  int num_sets;
  float* scratch;  // scratch_floats(...) floats, of one thread
};

struct CpuKernels {
  const char* isa;
  // Keys are padded to a multiple of this.
  int64_t panel;
  // Layout [panel index][dim][key of the panel]; padding is 0.
  void (*pack_keys)(const PackArgs&);
  // Layout [panel index over dim][key][dim of the panel]; padding is 0, rows up to padded_count.
  void (*pack_values)(const PackArgs&);
  void (*attend_rows)(const AttendRowsArgs&);
  // Floats that attend_rows needs for sets of at most max_count keys.
  int64_t (*scratch_floats)(int64_t head_dim, int64_t value_dim, int64_t max_count);

  int64_t padded(int64_t n) const { return (n + panel - 1) / panel * panel; }
  int64_t packed_key_floats(int64_t count, int64_t head_dim) const {
    return padded(count) * head_dim;
  }
  int64_t packed_value_floats(int64_t count, int64_t value_dim) const {
    return padded(count) * padded(value_dim);
  }
};

// The widest instruction set that this CPU has, or the one that the environment variable
// H2O_PREFILL_ISA names. Chosen once. Throws std::runtime_error if the variable names one that is
// unknown, not compiled in, or not there.
const CpuKernels& cpu_kernels();

}  // namespace h2o_prefill
