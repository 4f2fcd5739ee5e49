// Softmax attention of row blocks over packed key sets, whole rows at a time: all logits of a row,
// its exact maximum, the exponentials and their sum, the column sums in the same sweep, then PV.
// Compiled once per instruction set.
#include "kernels/cpu/attend_rows.h"

#include "kernels/cpu/float16.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tile.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::H2O_ISA {
namespace {

H2O_INLINE int64_t pad_to(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Score rows are this much longer than their keys, so that the rows of a tile do not share cache
// sets.
constexpr int64_t kRowGap = 16;

H2O_INLINE int64_t score_stride(int64_t count) { return pad_to(count, kPanel) + kRowGap; }

void load_row(const void* data, DType dtype, int64_t offset, int64_t n, float factor, float* row) {
  if (dtype == DType::kFloat32) {
    const float* x = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) row[i] = x[i] * factor;
  } else if (dtype == DType::kBFloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) row[i] = bfloat16_to_float(x[i]) * factor;
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) row[i] = float16_to_float(x[i]) * factor;
  }
}

void store_row(const float* row, int64_t n, float factor, void* data, DType dtype, int64_t offset) {
  if (dtype == DType::kFloat32) {
    float* x = static_cast<float*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) x[i] = row[i] * factor;
  } else if (dtype == DType::kBFloat16) {
    uint16_t* x = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) x[i] = float_to_bfloat16(row[i] * factor);
  } else {
    uint16_t* x = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) x[i] = float_to_float16(row[i] * factor);
  }
}

// Asks for a row before it is needed, for reading (0) or writing (1).
template <int kWrite>
H2O_INLINE void prefetch_row(const void* data, DType dtype, int64_t offset, int64_t n) {
  constexpr int64_t kCacheLine = 64;
  const char* row = static_cast<const char*>(data) + offset * size_of(dtype);
  for (int64_t byte = 0; byte < n * size_of(dtype); byte += kCacheLine) {
    __builtin_prefetch(row + byte, kWrite, 3);
  }
}

H2O_INLINE int64_t source_offset(const PackArgs& args, int64_t i) {
  return (args.positions ? args.positions[i] : i) * args.stride_row;
}

void pack_keys(const PackArgs& args) {
  constexpr int64_t kSlice =
      32;  // dims transposed at a time, so that the panel's lines are written while in L1
  float row[kSlice];
  for (int64_t panel = 0; panel * kPanel < args.count; ++panel) {
    float* out = args.packed + panel * kPanel * args.dim;
    for (int64_t d0 = 0; d0 < args.dim; d0 += kSlice) {
      const int64_t dims = args.dim - d0 < kSlice ? args.dim - d0 : kSlice;
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t key = panel * kPanel + j;
        if (key < args.count) {
          if (key + kPanel < args.count && d0 == 0)
            prefetch_row<0>(args.data, args.dtype, source_offset(args, key + kPanel), args.dim);
          load_row(args.data, args.dtype, source_offset(args, key) + d0, dims, 1.0F, row);
          for (int64_t d = 0; d < dims; ++d) out[(d0 + d) * kPanel + j] = row[d];
        } else {
          for (int64_t d = 0; d < dims; ++d) out[(d0 + d) * kPanel + j] = 0.0F;
        }
      }
    }
  }
}

void pack_values(const PackArgs& args) {
  const int64_t keys = pad_to(args.count, kPanel);
  for (int64_t d0 = 0; d0 < args.dim; d0 += kPanel) {
    const int64_t dims = args.dim - d0 < kPanel ? args.dim - d0 : kPanel;
    float* out = args.packed + d0 * keys;
    for (int64_t key = 0; key < keys; ++key, out += kPanel) {
      const int64_t filled = key < args.count ? dims : 0;
      if (filled) load_row(args.data, args.dtype, source_offset(args, key) + d0, filled, 1.0F, out);
      for (int64_t d = filled; d < kPanel; ++d) out[d] = 0.0F;
    }
  }
}

// Logits of a row block over the first `keys` keys: scores[r, j] = query[r] . key[j].
void multiply_queries(const float* query, int64_t head_dim, int row_tiles, const float* keys,
                      int64_t num_keys, float* scores, int64_t stride) {
  for (int64_t j = 0; j < num_keys; j += kPanel) {
    for (int tile = 0; tile < row_tiles; ++tile) {
      multiply_tile<false>(query + tile * kTileRows * head_dim, head_dim, keys + j * head_dim,
                           head_dim, scores + tile * kTileRows * stride + j, stride);
    }
  }
}

// Turns a row of logits into exp2(z - m); keys from `limit` on get 0. Returns m and the sum.
void exponentiate_row(float* z, int64_t limit, int64_t padded, float* m_out, float* l_out) {
  const int64_t visible = pad_to(limit, kLanes);
  for (int64_t j = limit; j < visible; ++j) z[j] = kNegInf;
  Vec highest = broadcast(kNegInf);
  for (int64_t j = 0; j < visible; j += kLanes) highest = max(highest, load(z + j));
  const float m = reduce_max(highest);
  const Vec shift = broadcast(m);
  Vec sum = Vec{};
  for (int64_t j = 0; j < visible; j += kLanes) {
    const Vec p = exp2_nonpositive(load(z + j) - shift);
    store(z + j, p);
    sum += p;
  }
  // What stands behind the limit has added at most 2^-126 a key to a sum that is at least 1.
  for (int64_t j = limit; j < padded; ++j) z[j] = 0.0F;
  *m_out = m;
  *l_out = reduce_add(sum);
}

// Rows whose probabilities are still in L1 when their column sums are taken.
constexpr int kSumRows = 4;

// colsum[j] += sum over kRows rows of p[r, j] / l[r].
template <int kRows>
void add_column_sums(const float* p, int64_t stride, const float* inverse_l, int64_t padded,
                     float* colsum) {
  Vec weight[kRows];
  for (int r = 0; r < kRows; ++r) weight[r] = broadcast(inverse_l[r]);
  for (int64_t j = 0; j < padded; j += kLanes) {
    Vec sum = load(colsum + j);
    for (int r = 0; r < kRows; ++r) sum = load(p + r * stride + j) * weight[r] + sum;
    store(colsum + j, sum);
  }
}

// acc[r, :] = sum over keys of p[r, j] value[j]; acc has rows of padded value dims.
void multiply_values(const float* p, int64_t stride, int row_tiles, const float* values,
                     int64_t num_keys, int64_t padded_keys, int64_t acc_stride, float* acc) {
  for (int64_t j = 0; j < num_keys; j += kKeyBlock) {
    const int64_t depth = num_keys - j < kKeyBlock ? num_keys - j : kKeyBlock;
    for (int64_t d = 0; d < acc_stride; d += kPanel) {
      const float* b = values + d * padded_keys + j * kPanel;
      for (int tile = 0; tile < row_tiles; ++tile) {
        const float* a = p + tile * kTileRows * stride + j;
        float* c = acc + tile * kTileRows * acc_stride + d;
        if (j == 0) {
          multiply_tile<false>(a, stride, b, depth, c, acc_stride);
        } else {
          multiply_tile<true>(a, stride, b, depth, c, acc_stride);
        }
      }
    }
  }
}

// What a row block has gathered over the key sets so far.
struct RowBlockState {
  float m[kRowBlock];
  float l[kRowBlock];
};

// Attends with one row block to one key set: leaves exp2 sums in `state` and the numerators in acc.
void attend_key_set(const AttendRowsArgs& args, const KeySet& set, int64_t first_row, int rows,
                    const float* query, float* scores, float* acc, RowBlockState& state) {
  const int row_tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t stride = score_stride(set.count);
  const int64_t num_keys = set.limits ? set.limits[first_row + rows - 1] : set.count;
  const int64_t padded = pad_to(num_keys, kPanel);
  const int64_t acc_stride = pad_to(args.value_dim, kPanel);
  if (num_keys == 0) {
    for (int r = 0; r < rows; ++r) state.m[r] = kNegInf, state.l[r] = 0.0F;
    for (int64_t i = 0; i < rows * acc_stride; ++i) acc[i] = 0.0F;
    return;
  }
  multiply_queries(query, args.head_dim, row_tiles, set.keys, num_keys, scores, stride);
  for (int first = 0; first < rows; first += kSumRows) {
    const int count = rows - first < kSumRows ? rows - first : kSumRows;
    float* p = scores + first * stride;
    float inverse_l[kSumRows];
    for (int r = 0; r < count; ++r) {
      const int row = first + r;
      const int64_t limit = set.limits ? set.limits[first_row + row] : set.count;
      exponentiate_row(p + r * stride, limit, padded, &state.m[row], &state.l[row]);
      inverse_l[r] = inverse_denominator(state.l[row]);
    }
    if (!set.colsum) continue;
    if (count == kSumRows) {
      add_column_sums<kSumRows>(p, stride, inverse_l, padded, set.colsum);
    } else {
      for (int r = 0; r < count; ++r) {
        add_column_sums<1>(p + r * stride, stride, inverse_l + r, padded, set.colsum);
      }
    }
  }
  multiply_values(scores, stride, row_tiles, set.values, num_keys, pad_to(set.count, kPanel),
                  acc_stride, acc);
}

// Fuses what a further key set gave into the first.
void merge_key_set(int rows, int64_t acc_stride, const RowBlockState& other, const float* other_acc,
                   RowBlockState& state, float* acc) {
  for (int r = 0; r < rows; ++r) {
    const MergeFactors factors = merge_factors(state.m[r], other.m[r]);
    state.m[r] = factors.m;
    state.l[r] = state.l[r] * factors.a + other.l[r] * factors.b;
    float* mine = acc + r * acc_stride;
    const float* theirs = other_acc + r * acc_stride;
    for (int64_t d = 0; d < acc_stride; ++d) mine[d] = mine[d] * factors.a + theirs[d] * factors.b;
  }
}

int64_t scratch_floats(int64_t head_dim, int64_t value_dim, int64_t max_count) {
  return kRowBlock * (head_dim + 2 * pad_to(value_dim, kPanel) + score_stride(max_count));
}

void attend_rows(const AttendRowsArgs& args) {
  const int64_t acc_stride = pad_to(args.value_dim, kPanel);
  float* query = args.scratch;
  float* acc = query + kRowBlock * args.head_dim;
  float* other_acc = acc + kRowBlock * acc_stride;
  float* scores = other_acc + kRowBlock * acc_stride;
  for (int64_t first = 0; first < args.rows; first += kRowBlock) {
    const int rows =
        static_cast<int>(args.rows - first < kRowBlock ? args.rows - first : kRowBlock);
    for (int r = 0; r < rows; ++r) {
      prefetch_row<1>(args.out, args.dtype, (first + r) * args.out_stride, args.value_dim);
      load_row(args.query, args.dtype, (first + r) * args.query_stride, args.head_dim,
               args.scale * kLog2E, query + r * args.head_dim);
    }
    // Rows that only fill a tile: their results are never read, but no NaN may slow them down.
    const int tile_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;
    for (int64_t i = rows * args.head_dim; i < tile_rows * args.head_dim; ++i) query[i] = 0.0F;

    // A row is far from the next one, which no hardware prefetcher follows.
    for (int64_t r = first + rows; r < args.rows && r < first + 2 * kRowBlock; ++r) {
      prefetch_row<0>(args.query, args.dtype, r * args.query_stride, args.head_dim);
    }

    RowBlockState state;
    attend_key_set(args, args.sets[0], first, rows, query, scores, acc, state);
    for (int s = 1; s < args.num_sets; ++s) {
      RowBlockState other;
      attend_key_set(args, args.sets[s], first, rows, query, scores, other_acc, other);
      merge_key_set(rows, acc_stride, other, other_acc, state, acc);
    }
    for (int r = 0; r < rows; ++r) {
      store_row(acc + r * acc_stride, args.value_dim, inverse_denominator(state.l[r]), args.out,
                args.dtype, (first + r) * args.out_stride);
      args.lse[first + r] = natural_lse(state.m[r], state.l[r]);
    }
  }
}

}  // namespace

#define H2O_STRING_OF(x) #x
#define H2O_STRING(x) H2O_STRING_OF(x)

extern const CpuKernels kCpuKernels;
const CpuKernels kCpuKernels = {H2O_STRING(H2O_ISA), kPanel,      pack_keys,
                                pack_values,         attend_rows, scratch_floats};

}  // namespace h2o_prefill::H2O_ISA
