// Keys and values in the order in which tiles read them. The conversion to words happens here, once
// for all query heads of a group.
#pragma once

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {

H2O_INLINE int64_t source_offset(const PackArgs& args, int64_t i) {
  return (args.positions ? args.positions[i] : i) * args.stride_row;
}

// Words [first, first + kLanes) of the row of a key, zero after its end and for keys from `count`
// on.
template <typename Products>
H2O_INLINE Vec load_key_words(const PackArgs& args, int64_t key, int64_t first) {
  constexpr int64_t kDims = kLanes * Products::kPerWord;
  const int64_t d0 = first * Products::kPerWord;
  float words[kLanes];
  if (key < args.count && d0 + kDims <= args.dim) {
    load_words<Products>(args.data, args.dtype, source_offset(args, key) + d0, kDims, 1.0F, words);
  } else {
    for (int i = 0; i < kLanes; ++i) words[i] = 0.0F;
    if (key < args.count)
      load_words<Products>(args.data, args.dtype, source_offset(args, key) + d0, args.dim - d0,
                           1.0F, words);
  }
  return load(words);
}

// Layout [panel][word of the row][key of the panel].
template <typename Products>
void pack_key_rows(const PackArgs& args) {
  const int64_t words = words_of<Products>(args.dim);
  for (int64_t first = args.begin; first < pad_to(args.end, kPanel); first += kLanes) {
    float* out = args.packed + first / kPanel * kPanel * words + first % kPanel;
    for (int64_t key = first + kLanes; key < first + 2 * kLanes && key < args.count; ++key)
      prefetch_row<0>(args.data, args.dtype, source_offset(args, key), args.dim);
    for (int64_t w = 0; w < words; w += kLanes) {
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) x[j] = load_key_words<Products>(args, first + j, w);
      transpose(x);
      const int64_t n = words - w < kLanes ? words - w : kLanes;
      if (n == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + (w + i) * kPanel, x[i]);
      } else {
        for (int i = 0; i < n; ++i) store(out + (w + i) * kPanel, x[i]);
      }
    }
  }
}

// Words of one value row, or of the two rows that are paired, the second one zero from `count` on.
template <typename Products>
H2O_INLINE void load_value_words(const PackArgs& args, int64_t word, int64_t d0, int64_t dims,
                                 float* out) {
  if constexpr (Products::kPerWord == 1) {
    load_floats(args.data, args.dtype, source_offset(args, word) + d0, dims, 1.0F, out);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(args.data) + d0;
    Word* words = reinterpret_cast<Word*>(out);
    const int64_t key = 2 * word;
    const uint16_t* low = x + source_offset(args, key);
    if (key + 1 < args.count) {
      const uint16_t* high = x + source_offset(args, key + 1);
      for (int64_t d = 0; d < dims; ++d) words[d] = low[d] | static_cast<uint32_t>(high[d]) << 16;
    } else {
      for (int64_t d = 0; d < dims; ++d) words[d] = low[d];
    }
  }
}

// Layout [panel over dim][word of keys][dim of the panel].
template <typename Products>
void pack_value_rows(const PackArgs& args) {
  const int64_t words = pad_to(args.count, kPanel) / Products::kPerWord;
  const int64_t begin = words_of<Products>(args.begin);
  const int64_t end = words_of<Products>(args.end);
  // What follows the last key is multiplied by 0, so it must be finite.
  const int64_t cleared = args.end == args.count ? words : end;
  for (int64_t d0 = 0; d0 < args.dim; d0 += kPanel) {
    const int64_t dims = args.dim - d0 < kPanel ? args.dim - d0 : kPanel;
    float* out = args.packed + d0 * words + begin * kPanel;
    for (int64_t word = begin; word < cleared; ++word, out += kPanel) {
      if (word < end) load_value_words<Products>(args, word, d0, dims, out);
      for (int64_t d = word < end ? dims : 0; d < kPanel; ++d) out[d] = 0.0F;
    }
  }
}

}  // namespace h2o_prefill::H2O_ISA
