// Inputs of the CUDA attention kernels, [B, H, T, D] in any layout that they read, and attention by
// its definition, over a list of keys for each row, in float64.
#pragma once

#include <functional>
#include <numeric>

#include "kernels/masked_softmax.h"
#include "kernels/rows.h"

namespace h2o_prefill::testing {

// A tensor of rows. All elements are NaN at first; those between rows stay so.
class Heads {
 public:
  // transposed: lies as [B, T, H, D].
  Heads(DType dtype, int64_t batch, int64_t heads, int64_t length, int64_t dim,
        bool transposed = false, int64_t gap = 0)
      : rows(dtype, batch * heads * length, dim, gap),
        batch(batch),
        heads(heads),
        length(length),
        transposed(transposed) {}

  Rows rows;
  int64_t batch;
  int64_t heads;
  int64_t length;
  bool transposed;

  int64_t row(int64_t b, int64_t h, int64_t t) const {
    return transposed ? (b * length + t) * heads + h : (b * heads + h) * length + t;
  }

  HeadsView view() const {
    HeadsView view{};
    view.data = const_cast<void*>(rows.data());
    view.dtype = rows.dtype();
    view.batch = batch;
    view.heads = heads;
    view.length = length;
    view.dim = rows.dim();
    view.stride_batch = heads * length * rows.stride();
    view.stride_head = rows.stride() * (transposed ? 1 : length);
    view.stride_row = rows.stride() * (transposed ? heads : 1);
    return view;
  }

  // [B, H, T, D], whatever the layout.
  std::vector<double> numbers() const {
    std::vector<double> all;
    for (int64_t i = 0; i < batch * heads * length; ++i) {
      const int64_t at = row(i / length / heads, i / length % heads, i % length);
      for (int64_t d = 0; d < rows.dim(); ++d) all.push_back(rows.get(at, d));
    }
    return all;
  }
};

struct AttentionInputs {
  Heads query;
  Heads key;
  Heads value;
  float scale;
  double softcap;            // logits z become softcap tanh(z / softcap); 0: they do not
  std::vector<float> sinks;  // [Hq]: more logits, of no key; or empty
  std::vector<double> queries = query.numbers();
  std::vector<double> keys = key.numbers();
  std::vector<double> values = value.numbers();

  int64_t group() const { return query.heads / key.heads; }
  float scale_log2() const { return scale * 1.44269504F; }
  const double* key_at(int64_t b, int64_t h, int64_t t) const {
    return &keys[((b * key.heads + h) * key.length + t) * key.rows.dim()];
  }
  const double* value_at(int64_t b, int64_t h, int64_t t) const {
    return &values[((b * value.heads + h) * value.length + t) * value.rows.dim()];
  }
};

struct AttentionShape {
  DType dtype;
  int64_t rows;  // queries
  int64_t keys;
  int64_t dim = 64;
  int64_t value_dim = 64;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t batch = 1;
  bool transposed = false;
  double softcap = 0.0;
  bool sinks = false;

  int64_t past() const { return keys - rows; }
};

inline std::string describe(const AttentionShape& x) {
  return name_of(x.dtype) + ", rows " + std::to_string(x.rows) + ", keys " +
         std::to_string(x.keys) + ", dims " + std::to_string(x.dim) + " and " +
         std::to_string(x.value_dim) + ", heads " + std::to_string(x.heads);
}

// Logits are far from uniform; values are in [-1, 1].
inline AttentionInputs make_inputs(const AttentionShape& x) {
  const int64_t gap = x.transposed ? 8 : 0;
  Heads query(x.dtype, x.batch, x.heads, x.rows, x.dim, x.transposed, gap);
  Heads key(x.dtype, x.batch, x.kv_heads, x.keys, x.dim, x.transposed, 2 * gap);
  Heads value(x.dtype, x.batch, x.kv_heads, x.keys, x.value_dim, x.transposed);
  Random random(static_cast<uint32_t>(x.rows * 1000 + x.keys + x.dim));
  random.fill(query.rows, 2.0);
  random.fill(key.rows, 2.0);
  random.fill(value.rows, 1.0);
  std::vector<float> sinks;
  for (int64_t head = 0; x.sinks && head < x.heads; ++head) {
    sinks.push_back(static_cast<float>(head) - 1.5F);
  }
  return {query, key, value, 1.0F / std::sqrt(static_cast<float>(x.dim)), x.softcap, sinks};
}

// Positions that row t of the call sees, of KV head h of batch row b.
using VisibleKeys = std::function<std::vector<int64_t>(int64_t b, int64_t h, int64_t t)>;

inline std::vector<double> logits(const AttentionInputs& in, int64_t b, int64_t head, int64_t t,
                                  const std::vector<int64_t>& keys) {
  const int64_t dim = in.query.rows.dim();
  const double* const query =
      &in.queries[((b * in.query.heads + head) * in.query.length + t) * dim];
  std::vector<double> z;
  for (const int64_t position : keys) {
    const double* const key = in.key_at(b, head / in.group(), position);
    z.push_back(capped(in.scale * std::inner_product(query, query + dim, key, 0.0), in.softcap));
  }
  return z;
}

struct Expected {
  std::vector<double> out;  // [B, Hq, T, Dv]
  std::vector<double> lse;  // [B, Hq, T]
};

inline Expected attend(const AttentionInputs& in, const VisibleKeys& visible) {
  const Heads& query = in.query;
  Expected expected;
  for (int64_t i = 0; i < query.batch * query.heads * query.length; ++i) {
    const int64_t b = i / query.length / query.heads, head = i / query.length % query.heads;
    const int64_t t = i % query.length, h = head / in.group();
    const std::vector<int64_t> keys = visible(b, h, t);
    const std::vector<double> z = logits(in, b, head, t, keys);
    const Softmax row = softmax(z, in.sinks.empty() ? -HUGE_VAL : in.sinks[head]);
    expected.lse.push_back(row.lse);
    for (int64_t d = 0; d < in.value.rows.dim(); ++d) {
      double sum = 0.0;
      for (size_t j = 0; j < keys.size(); ++j) {
        sum += row.probabilities[j] * in.value_at(b, h, keys[j])[d];
      }
      expected.out.push_back(sum);
    }
  }
  return expected;
}

// The sums of exp(z - lse) of every position, over the rows of each query head, then over the query
// heads of a KV head, or their maximum: [B, Hkv, keys]. A row whose lse is -inf counts nothing.
inline std::vector<double> expected_sums(const AttentionInputs& in, const VisibleKeys& visible,
                                         bool reduce_max, const std::vector<float>& lse) {
  const int64_t keys = in.key.length;
  std::vector<double> sums(in.key.batch * in.key.heads * keys);
  for (int64_t i = 0; i < in.query.batch * in.query.heads; ++i) {
    const int64_t b = i / in.query.heads, head = i % in.query.heads, h = head / in.group();
    std::vector<double> of_head(keys);
    for (int64_t t = 0; t < in.query.length; ++t) {
      const float offset = lse[i * in.query.length + t];
      if (offset == -HUGE_VALF) continue;
      const std::vector<int64_t> positions = visible(b, h, t);
      const std::vector<double> z = logits(in, b, head, t, positions);
      for (size_t j = 0; j < z.size(); ++j) of_head[positions[j]] += std::exp(z[j] - offset);
    }
    for (int64_t j = 0; j < keys; ++j) {
      double& sum = sums[(b * in.key.heads + h) * keys + j];
      sum = reduce_max ? std::max(sum, of_head[j]) : sum + of_head[j];
    }
  }
  return sums;
}

// Infinite if one is NaN.
template <typename A, typename B>
double largest_difference(const std::vector<A>& a, const std::vector<B>& b) {
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = a[i] == b[i] ? 0.0 : std::fabs(a[i] - b[i]);  // infinities too
    if (std::isnan(difference)) return HUGE_VAL;
    largest = std::max(largest, difference);
  }
  return largest;
}

// Memory sets: `count` positions below `limit` of each (batch row, KV head), one less for each
// later one but never fewer than 0, ascending and padded with -1 to `width`.
inline std::vector<int32_t> memory_sets(int64_t sets, int64_t width, int64_t count, int64_t limit) {
  Random random(static_cast<uint32_t>(width * 100 + count));
  std::vector<int32_t> all;
  for (int64_t set = 0; set < sets; ++set) {
    std::vector<int32_t> positions = random.permutation(limit);
    positions.resize(std::max<int64_t>(0, std::min(count - set, limit)));
    std::sort(positions.begin(), positions.end());
    positions.resize(width, -1);
    all.insert(all.end(), positions.begin(), positions.end());
  }
  return all;
}

// The positions of one set.
inline std::vector<int64_t> members(const std::vector<int32_t>& sets, int64_t set, int64_t width) {
  std::vector<int64_t> positions;
  for (int64_t i = set * width; i < (set + 1) * width && sets[i] >= 0; ++i) {
    positions.push_back(sets[i]);
  }
  return positions;
}

inline std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> positions(end - begin);
  std::iota(positions.begin(), positions.end(), begin);
  return positions;
}

}  // namespace h2o_prefill::testing
