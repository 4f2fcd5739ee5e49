// Softmax attention of row blocks over packed key sets, whole rows at a time: all logits of a row,
// its exact maximum, the exponentials and their sum, the column sums in the same sweep, then PV.
// Compiled once per instruction set.
#include "kernels/cpu/attend_rows.h"

#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/softmax_rows.h"
#include "kernels/cpu/tile.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::H2O_ISA {
namespace {

H2O_INLINE int64_t word_pair_stride(int64_t count) { return pad_to(count, kPanel) / 2 + kRowGap; }

// c[rows, kPanel] (+)= a b, for one panel of b.
template <typename Products, bool kAccumulate>
H2O_INLINE void multiply_panel(BFloat16Gemm gemm, const float* a, int64_t lda, int rows,
                               const RowEnds& ends, const float* b, int64_t depth, float* c,
                               int64_t ldc) {
  if (Products::kPerWord == 2 && gemm) {
    gemm(rows, kPanel, 2 * depth, 2 * lda, kPanel, ldc, kAccumulate, a, b, c);
  } else {
    multiply_rows<Products, kAccumulate>(a, lda, rows, ends, b, depth, c, ldc);
  }
}

// Logits of a row block over the first `keys` keys: scores[r, j] = query[r] . key[j].
template <typename Products>
void multiply_queries(BFloat16Gemm gemm, const float* query, int64_t words, int rows,
                      const float* keys, int64_t num_keys, float* scores, int64_t stride) {
  for (int64_t j = 0; j < num_keys; j += kPanel) {
    multiply_panel<Products, false>(gemm, query, words, rows, RowEnds{}, keys + j * words, words,
                                    scores + j, stride);
  }
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

// acc[r, :] = sum over keys of p[r, j] value[j]; acc has rows of padded value dims. limits: as of a
// KeySet, from the block's first row on. Counts words of keys, from the first of p on, which is
// word `first` of the set.
template <typename Products>
void multiply_values(BFloat16Gemm gemm, const float* p, int64_t stride, int rows,
                     const int32_t* limits, const float* values, int64_t first, int64_t key_words,
                     int64_t packed_words, int64_t acc_stride, float* acc) {
  for (int64_t j = 0; j < key_words; j += kKeyWords) {
    const int64_t depth = key_words - j < kKeyWords ? key_words - j : kKeyWords;
    const RowEnds ends{limits, first + j};
    for (int64_t d = 0; d < acc_stride; d += kPanel) {
      const float* b = values + d * packed_words + (first + j) * kPanel;
      if (j == 0) {
        multiply_panel<Products, false>(gemm, p + j, stride, rows, ends, b, depth, acc + d,
                                        acc_stride);
      } else {
        multiply_panel<Products, true>(gemm, p + j, stride, rows, ends, b, depth, acc + d,
                                       acc_stride);
      }
    }
  }
}

// Softmax state of a row block over the key sets processed so far.
struct RowBlockState {
  float m[kRowBlock];
  float l[kRowBlock];
};

// One row block of one query head, ready to be multiplied.
struct RowBlock {
  int64_t first;  // of the call's rows
  int rows;
  const float* query;  // words
  LogitScale logits;
};

// Attends with one row block to one key set: leaves exp2 sums in `state` and the numerators in acc.
template <typename Products>
void attend_key_set(const AttendRowsArgs& args, const KeySet& set, const RowBlock& block,
                    float* scores, float* acc, RowBlockState& state) {
  const int rows = block.rows;
  const int64_t stride = score_stride(set.count);
  const int64_t first_key = set.begins ? set.begins[block.first] : 0;
  const int64_t last_key = set.limits ? set.limits[block.first + rows - 1] : set.count;
  // Leaves out whole panels that no row sees.
  const int64_t begin = first_key / kPanel * kPanel;
  const int64_t num_keys = last_key - begin;
  const int64_t padded = pad_to(num_keys, kPanel);
  const int64_t acc_stride = pad_to(args.value_dim, kPanel);
  const int64_t query_words = words_of<Products>(args.head_dim);
  const float sink = args.sink * kLog2E;
  if (first_key >= last_key) {
    for (int r = 0; r < rows; ++r) state.m[r] = kNegInf, state.l[r] = 0.0F;
    for (int64_t i = 0; i < rows * acc_stride; ++i) acc[i] = 0.0F;
    return;
  }
  // Words replace the logits, or follow all of them where column sums need the probabilities and
  // words are not these.
  const bool apart = Products::kPerWord == 2 && set.colsum;
  float* words = apart ? scores + kRowBlock * stride : scores;
  const int64_t word_stride = apart ? word_pair_stride(set.count) : stride;
  const auto exponentiate =
      apart ? exponentiate_row<Products, true> : exponentiate_row<Products, false>;
  multiply_queries<Products>(args.gemm, block.query, query_words, rows,
                             set.keys + begin * query_words, num_keys, scores, stride);
  for (int first = 0; first < rows; first += kSumRows) {
    const int count = rows - first < kSumRows ? rows - first : kSumRows;
    float* p = scores + first * stride;
    float inverse_l[kSumRows];
    for (int r = 0; r < count; ++r) {
      const int row = first + r;
      const int64_t hidden = set.begins ? set.begins[block.first + row] - begin : 0;
      const int64_t limit = (set.limits ? set.limits[block.first + row] : set.count) - begin;
      if (block.logits.cap_scale > 0.0F) cap_row(p + r * stride, block.logits.cap_scale, limit);
      exponentiate(p + r * stride, words + row * word_stride, block.logits.scale, hidden, limit,
                   padded, &state.m[row], &state.l[row]);
      inverse_l[r] = finish_row(state.m[row], state.l[row], sink).weight;
    }
    if (!set.colsum) continue;
    if (count == kSumRows) {
      add_column_sums<kSumRows>(p, stride, inverse_l, padded, set.colsum + begin);
    } else {
      for (int r = 0; r < count; ++r) {
        add_column_sums<1>(p + r * stride, stride, inverse_l + r, padded, set.colsum + begin);
      }
    }
  }
  // AMX adds up the rest of a tile in another order: without one, a row's result does not depend on
  // which rows are beside it.
  const int64_t multiplied = args.gemm ? padded : num_keys;
  multiply_values<Products>(args.gemm, words, word_stride, rows,
                            set.limits ? set.limits + block.first : nullptr, set.values,
                            begin / Products::kPerWord, words_of<Products>(multiplied),
                            pad_to(set.count, kPanel) / Products::kPerWord, acc_stride, acc);
}

// Merges the result of a further key set into the first.
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

// Merges a row's earlier result into its numerator, which leaves no weight to apply.
FinishedRow merge_earlier(const AttendRowsArgs& args, int64_t r, const FinishedRow& row,
                          float* numerator) {
  const MergeWeights weights = merge_weights(args.lse[r], row.lse);
  const float mine = weights.b * row.weight;
  const float* earlier = args.earlier + r * args.earlier_stride;
  for (int64_t d = 0; d < args.value_dim; ++d) {
    numerator[d] = numerator[d] * mine + earlier[d] * weights.a;
  }
  return {.weight = 1.0F, .lse = weights.lse};
}

// The queries of a row block as words.
template <typename Products>
RowBlock load_queries(const AttendRowsArgs& args, int64_t first, int rows, float* query) {
  const int64_t words = words_of<Products>(args.head_dim);
  const RowBlock block{first, rows, query, logit_scale(args.scale, args.softcap)};
  for (int r = 0; r < rows; ++r) {
    const int64_t offset = (first + r) * args.query_stride;
    load_words<Products>(args.query, args.dtype, offset, args.head_dim, block.logits.sign,
                         query + r * words);
  }
  return block;
}

int64_t scratch_floats(int64_t head_dim, int64_t value_dim, int64_t max_count) {
  return kRowBlock * (head_dim + 2 * pad_to(value_dim, kPanel) + score_stride(max_count) +
                      (kBFloat16Products ? word_pair_stride(max_count) : 0));
}

template <typename Products>
void attend_row_blocks(const AttendRowsArgs& args) {
  const int64_t acc_stride = pad_to(args.value_dim, kPanel);
  float* query = args.scratch;
  float* acc = query + kRowBlock * args.head_dim;
  float* other_acc = acc + kRowBlock * acc_stride;
  float* scores = other_acc + kRowBlock * acc_stride;
  for (int64_t first = 0; first < args.rows; first += kRowBlock) {
    const int rows =
        static_cast<int>(args.rows - first < kRowBlock ? args.rows - first : kRowBlock);
    const RowBlock block = load_queries<Products>(args, first, rows, query);
    // Rows lie too far apart for a hardware prefetcher.
    for (int r = 0; r < rows; ++r) {
      prefetch_row<1>(args.out, args.out_dtype, (first + r) * args.out_stride, args.value_dim);
    }
    for (int64_t r = first + rows; r < args.rows && r < first + 2 * kRowBlock; ++r) {
      prefetch_row<0>(args.query, args.dtype, r * args.query_stride, args.head_dim);
    }

    RowBlockState state;
    attend_key_set<Products>(args, args.sets[0], block, scores, acc, state);
    for (int s = 1; s < args.num_sets; ++s) {
      RowBlockState other;
      attend_key_set<Products>(args, args.sets[s], block, scores, other_acc, other);
      merge_key_set(rows, acc_stride, other, other_acc, state, acc);
    }
    for (int r = 0; r < rows; ++r) {
      FinishedRow row = finish_row(state.m[r], state.l[r], args.sink * kLog2E);
      float* numerator = acc + r * acc_stride;
      if (args.earlier) row = merge_earlier(args, first + r, row, numerator);
      store_floats(numerator, args.value_dim, row.weight, args.out, args.out_dtype,
                   (first + r) * args.out_stride);
      args.lse[first + r] = row.lse;
    }
  }
}

void pack_keys(const PackArgs& args) {
  with_products(args.dtype, [&](auto kind) { pack_key_rows<decltype(kind)>(args); });
}

void pack_values(const PackArgs& args) {
  with_products(args.dtype, [&](auto kind) { pack_value_rows<decltype(kind)>(args); });
}

void attend_rows(const AttendRowsArgs& args) {
  with_products(args.dtype, [&](auto kind) { attend_row_blocks<decltype(kind)>(args); });
}

}  // namespace

#define H2O_STRING_OF(x) #x
#define H2O_STRING(x) H2O_STRING_OF(x)

void attend_token(const AttendTokenArgs& args);  // attend_token.cpp
extern const LinearKernels kLinearKernels;       // linear_chunk.cpp
extern const PackedLinearKernels kPackedLinearKernels;
extern const CpuKernels kCpuKernels;
const CpuKernels kCpuKernels = {H2O_STRING(H2O_ISA),
                                kPanel,
                                kBFloat16Products,
                                nullptr,
                                nullptr,
                                pack_keys,
                                pack_values,
                                attend_rows,
                                attend_token,
                                scratch_floats,
                                &kLinearKernels,
                                &kPackedLinearKernels};

}  // namespace h2o_prefill::H2O_ISA
