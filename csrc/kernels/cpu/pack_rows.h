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

// Layout [panel][word of the row][key of the panel].
template <typename Products>
void pack_key_rows(const PackArgs& args) {
  // Words transposed at a time, so that the panel's lines are written while in L1.
  constexpr int64_t kSlice = 32;
  constexpr int64_t kSliceDims = kSlice * Products::kPerWord;
  const int64_t words = words_of<Products>(args.dim);
  float row[kSlice];
  for (int64_t first = args.begin; first < args.end; first += kPanel) {
    float* panel = args.packed + first * words;
    const int64_t keys = args.count - first < kPanel ? args.count - first : kPanel;
    if (keys < kPanel) {
      for (int64_t i = 0; i < words * kPanel; ++i) panel[i] = 0.0F;
    }
    for (int64_t d0 = 0; d0 < args.dim; d0 += kSliceDims) {
      const int64_t dims = args.dim - d0 < kSliceDims ? args.dim - d0 : kSliceDims;
      const int64_t slice = words_of<Products>(dims);
      float* out = panel + d0 / Products::kPerWord * kPanel;
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t key = first + j;
        if (key + kPanel < args.count && d0 == 0)
          prefetch_row<0>(args.data, args.dtype, source_offset(args, key + kPanel), args.dim);
        load_words<Products>(args.data, args.dtype, source_offset(args, key) + d0, dims, 1.0F, row);
        for (int64_t w = 0; w < slice; ++w) out[w * kPanel + j] = row[w];
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
    const int64_t key = word / kLanes * (2 * kLanes) + word % kLanes;
    const uint16_t* low = x + source_offset(args, key);
    if (key + kLanes < args.count) {
      const uint16_t* high = x + source_offset(args, key + kLanes);
      for (int64_t d = 0; d < dims; ++d) words[d] = low[d] | static_cast<uint32_t>(high[d]) << 16;
    } else {
      for (int64_t d = 0; d < dims; ++d) words[d] = low[d];
    }
  }
}

// Layout [panel over dim][word of keys][dim of the panel].
template <typename Products>
void pack_value_rows(const PackArgs& args) {
  const int64_t words = (args.count + kPanel - 1) / kPanel * kPanel / Products::kPerWord;
  const int64_t begin = key_words_of<Products>(args.begin);
  const int64_t end = key_words_of<Products>(args.end);
  for (int64_t d0 = 0; d0 < args.dim; d0 += kPanel) {
    const int64_t dims = args.dim - d0 < kPanel ? args.dim - d0 : kPanel;
    float* out = args.packed + d0 * words + begin * kPanel;
    for (int64_t word = begin; word < end; ++word, out += kPanel) {
      load_value_words<Products>(args, word, d0, dims, out);
      for (int64_t d = dims; d < kPanel; ++d) out[d] = 0.0F;
    }
  }
}

}  // namespace h2o_prefill::H2O_ISA
