// The softmax of a row of products of queries and keys.
#pragma once

#include "kernels/cpu/products.h"
#include "kernels/cpu/tile.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill::H2O_ISA {

// How products of queries and keys become logits in base 2. A scale that is not positive moves into
// the queries, so that the highest product belongs to the highest logit.
struct LogitScale {
  float sign;       // of the queries
  float cap_scale;  // products z become tanh(z cap_scale) first; 0: they do not
  float scale;      // from the capped product to a logit in base 2, positive
};

H2O_INLINE LogitScale logit_scale(float scale, float softcap) {
  float sign = 1.0F;
  if (scale < 0.0F) sign = -1.0F, scale = -scale;
  if (scale == 0.0F) sign = 0.0F, scale = 1.0F;
  if (softcap > 0.0F) {
    const float cap_scale = __builtin_fminf(scale / softcap, __FLT_MAX__);
    if (cap_scale > 0.0F) return {sign, cap_scale, softcap * kLog2E};
    sign = 0.0F;  // so small a quotient that all logits are 0
  }
  return {sign, 0.0F, scale * kLog2E};
}

// Turns a row of products z, up to `limit` or the end of its vector, into tanh(z scale).
H2O_INLINE void cap_row(float* z, float scale, int64_t limit) {
  const Vec factor = broadcast(scale);
  for (int64_t j = 0; j < limit; j += kLanes) store(z + j, tanh(load(z + j) * factor));
}

// Turns a row of products z into p = exp2(z scale - m), m their maximum, as words, which may be the
// same memory unless z is to be p as well (kKeep); keys before `begin` and from `limit` on get 0.
// Returns m and the sum. The maximum is subtracted before scaling: one fused operation that rounds
// m alone is above 0 for large logits.
template <typename Products, bool kKeep>
void exponentiate_row(float* z, float* words, float scale, int64_t begin, int64_t limit,
                      int64_t padded, float* m_out, float* l_out) {
  if (begin >= limit) begin = limit = 0;
  const int64_t first = begin / kPanel * kPanel;
  const int64_t visible = pad_to(limit, kPanel);
  for (int64_t j = first; j < begin; ++j) z[j] = kNegInf;
  for (int64_t j = limit; j < visible; ++j) z[j] = kNegInf;
  Vec highest[kTileVectors] = {broadcast(kNegInf), broadcast(kNegInf)};
  for (int64_t j = first; j < visible; j += kPanel) {
    for (int i = 0; i < kTileVectors; ++i) highest[i] = max(highest[i], load(z + j + i * kLanes));
  }
  const float top = reduce_max(max(highest[0], highest[1]));
  const float m = top * scale;
  const Vec subtrahend = broadcast(top);
  const Vec factor = broadcast(scale);
  Vec sum = Vec{};
  for (int64_t j = first; j < visible; j += kPanel) {
    Vec p[kTileVectors];
    for (int i = 0; i < kTileVectors; ++i) {
      const Vec x = (load(z + j + i * kLanes) - subtrahend) * factor;
      p[i] = exp2_nonpositive<Products::kExp2Degree>(x);
      sum += p[i];
    }
    if (kKeep) {
      for (int i = 0; i < kTileVectors; ++i) store(z + j + i * kLanes, p[i]);
    }
    Products::store_words(words + j / Products::kPerWord, p);
  }
  // Hidden keys have added at most 2^-126 each to a sum that is at least 1.
  const auto clear = [&](int64_t from, int64_t to) {
    auto* elements = reinterpret_cast<typename Products::Element*>(words);
    for (int64_t j = from; j < to; ++j) elements[j] = 0;
    if (!kKeep) return;
    for (int64_t j = from; j < to; ++j) z[j] = 0.0F;
  };
  clear(0, begin);
  clear(limit, padded);
  *m_out = m;
  *l_out = reduce_add(sum);
}

}  // namespace h2o_prefill::H2O_ISA
