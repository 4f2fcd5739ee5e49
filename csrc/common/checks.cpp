#include "common/checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "common/config_fields.h"
#include "common/rules.h"
#include "common/tensors.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

using at::Tensor;

void check_indices(const char* name, const Tensor& indices, const Tensor& x) {
  check_per_kv_head(name, indices, x, at::kInt, "the other tensors");
}

// Calls check(list, count) with every list of int32 [B, Hkv, M] that the host can read.
template <typename Check>
void for_each_list(const Tensor& lists, const Check& check) {
  if (!lists.is_cpu() || lists.numel() == 0) return;
  const auto here = lists.contiguous();
  const int32_t* const first = here.const_data_ptr<int32_t>();
  const int64_t width = here.size(2);
  for (int64_t begin = 0; begin < here.numel(); begin += width) check(first + begin, width);
}

void check_in_range(const char* name, int32_t position, int64_t length) {
  TORCH_CHECK_VALUE(position >= -1 && position < length, name, " must be -1 or in [0, ", length,
                    "), got ", position);
}

// The number of positions before the first -1; throws if anything but -1 follows.
int64_t check_end(const char* name, const int32_t* list, int64_t width, int64_t length) {
  int64_t count = 0;
  for (; count < width && list[count] != -1; ++count) check_in_range(name, list[count], length);
  for (int64_t i = count; i < width; ++i) {
    TORCH_CHECK_VALUE(list[i] == -1, name, " must hold -1 only after all positions, got ", list[i],
                      " after a -1");
  }
  return count;
}

// Whether positions rise and are followed by -1 alone. Branch-free, so that compilers vectorise it:
// every call of the operators checks its sets.
bool is_memory_set(const int32_t* list, int64_t width, int64_t length) {
  const auto limit =
      static_cast<int32_t>(std::min<int64_t>(length, std::numeric_limits<int32_t>::max()));
  int32_t wrong = width > 0 && (list[0] < -1 || list[0] >= limit);
  for (int64_t i = 1; i < width; ++i) {
    const int32_t before = list[i - 1], here = list[i];
    const int32_t rises = (before >= 0) & (here > before) & (here < limit);
    wrong |= (rises | (here == -1)) ^ 1;
  }
  return wrong == 0;
}

// What pack_linear returns for a weight of this many outputs.
void check_packed(const Tensor& packed, const Tensor& scales, int64_t outputs) {
  check_dims("packed", packed, 3);
  const bool is_int8 = packed.scalar_type() == at::kChar;
  TORCH_CHECK_VALUE(is_int8 || at::isReducedFloatingType(packed.scalar_type()),
                    "packed must be bfloat16, float16 or int8, got ", describe(packed));
  TORCH_CHECK_VALUE(packed.numel() > 0 && packed.size(1) % 2 == 0 &&
                        packed.size(2) == kPanelOutputs && packed.is_contiguous(),
                    "packed must be a contiguous [panels, even inputs, ", kPanelOutputs, "], got ",
                    describe(packed));
  const int64_t most = packed.size(0) * kPanelOutputs;
  check_between("outputs", outputs, most - kPanelOutputs + 1, most);
  check_dims("scales", scales, 1);
  check_dtype("scales", scales, at::kFloat);
  check_size("scales", scales, 0, is_int8 ? outputs : 0, "the outputs of int8");
  check_device("scales", scales, packed, "packed");
}

// Whether two views of one storage that are not dense share elements. Parts of one tensor have its
// strides, so that their offsets are where their ranges begin in each of its dimensions.
bool parts_overlap(const Tensor& a, const Tensor& b) {
  if (a.strides() != b.strides() || a.itemsize() != b.itemsize()) return true;
  int64_t offset_a = a.storage_offset(), offset_b = b.storage_offset();
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.stride(i) > 0 && (a.size(i) > 1 || b.size(i) > 1)) dims.push_back(i);
  }
  std::sort(dims.begin(), dims.end(),
            [&](int64_t i, int64_t j) { return a.stride(i) > a.stride(j); });
  for (const int64_t i : dims) {
    const int64_t begin_a = offset_a / a.stride(i), begin_b = offset_b / a.stride(i);
    if (begin_a >= begin_b + b.size(i) || begin_b >= begin_a + a.size(i)) return false;
    offset_a %= a.stride(i);
    offset_b %= a.stride(i);
  }
  return offset_a == offset_b;
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const auto status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  return a.is_alias_of(b) && parts_overlap(a, b);
}

}  // namespace

at::Tensor AttentionArguments::empty_lse() const {
  return at::empty({query.size(0), query.size(1), length()},
                   query.options().dtype(accumulate_type(query)));
}

AttentionArguments AttentionArguments::with_rows(at::Tensor (*convert)(const at::Tensor&)) const {
  AttentionArguments x{convert(query), convert(key), convert(value), softmax_scale};
  if (sinks) x.sinks = sinks->to(at::kFloat).contiguous();
  x.softcap = softcap;
  return x;
}

AttentionArguments AttentionArguments::last_rows(int64_t rows) const {
  AttentionArguments x = *this;
  x.query = query.narrow(2, length() - rows, rows);
  return x;
}

void check_no_internal_overlap(const NamedTensor& written) {
  check_strided(written.name, written.tensor);
  TORCH_CHECK_VALUE(at::has_internal_overlap(written.tensor) != at::MemOverlap::Yes, written.name,
                    " must have every element at an address of its own, since it is written in "
                    "place; clone() it: got shape ",
                    written.tensor.sizes(), " with strides ", written.tensor.strides());
}

void check_no_overlap(const NamedTensor& written, c10::ArrayRef<NamedTensor> others) {
  for (const NamedTensor& other : others) {
    check_strided(other.name, other.tensor);
    TORCH_CHECK_VALUE(!share_memory(written.tensor, other.tensor), other.name,
                      " must not share memory with ", written.name,
                      ", which is written in place; clone() one of them");
  }
}

void check_qkv(const AttentionArguments& x, const char* key, const char* value) {
  const auto& [q, k, v] = std::tie(x.query, x.key, x.value);
  check_dims("q", q, 4);
  check_dims(key, k, 4);
  check_dims(value, v, 4);
  check_float("q", q);
  check_same_kind(key, k, q, "q");
  check_same_kind(value, v, q, "q");
  check_size(key, k, 0, q.size(0), "the batch size of q");
  check_size(value, v, 0, q.size(0), "the batch size of q");
  check_size(key, k, 3, q.size(3), "the head dim of q");
  check_size(value, v, 1, k.size(1), "the KV heads");
  check_size(value, v, 2, k.size(2), "as many rows as keys");
  TORCH_CHECK_VALUE(q.size(3) > 0 && v.size(3) > 0, "head dims must be > 0, got ", q.size(3),
                    " and ", v.size(3));
  TORCH_CHECK_VALUE(q.size(1) > 0 && k.size(1) > 0,
                    "q and k must have heads in dimension 1, got shapes ", q.sizes(), " and ",
                    k.sizes());
  check_head_groups(q, k);
  TORCH_CHECK_VALUE(k.size(2) <= std::numeric_limits<int32_t>::max(),
                    "k must have fewer than 2^31 rows, got ", k.size(2));
  // Kernels scale in float32.
  TORCH_CHECK_VALUE(!x.softmax_scale || std::isfinite(static_cast<float>(*x.softmax_scale)),
                    "scale must be finite, got ", *x.softmax_scale);
}

void check_logit_options(const AttentionArguments& x) {
  TORCH_CHECK_VALUE(std::isfinite(x.softcap) && x.softcap >= 0.0,
                    "softcap must be finite and >= 0 (0: none), got ", x.softcap);
  if (!x.sinks) return;
  check_dims("sinks", *x.sinks, 1);
  check_float("sinks", *x.sinks);
  check_device("sinks", *x.sinks, x.query, "q");
  check_size("sinks", *x.sinks, 0, x.query.size(1), "one entry a query head");
}

void check_per_kv_head(const char* name, const Tensor& t, const Tensor& x, at::ScalarType dtype,
                       const char* of) {
  check_dims(name, t, 3);
  check_size(name, t, 0, x.size(0), "the batch size");
  check_size(name, t, 1, x.size(1), "the KV heads");
  check_dtype(name, t, dtype);
  check_device(name, t, x, of);
}

void check_memory_sets(const char* name, const Tensor& memory, const Tensor& x, int64_t length) {
  check_indices(name, memory, x);
  for_each_list(memory, [&](const int32_t* list, int64_t width) {
    if (is_memory_set(list, width, length)) return;
    const int64_t count = check_end(name, list, width, length);
    for (int64_t i = 1; i < count; ++i) {
      TORCH_CHECK_VALUE(list[i - 1] < list[i], name, " must be strictly ascending, got ", list[i],
                        " after ", list[i - 1]);
    }
  });
}

void check_intra_chunk_attention(const AttentionArguments& x, int64_t chunk_size) {
  check_qkv(x);
  check_size("k", x.key, 2, x.query.size(2), "the length of q");
  check_at_least("chunk_size", chunk_size, 1);
}

void check_memory_attention(const AttentionArguments& x, const Tensor& indices) {
  check_qkv(x);
  check_indices("indices", indices, x.key);
  for_each_list(indices, [&](const int32_t* list, int64_t width) {
    check_end("indices", list, width, x.total());
  });
}

void check_dense_attention(const AttentionArguments& x) {
  check_qkv(x);
  check_logit_options(x);
  TORCH_CHECK_VALUE(x.past() >= 0, "k must hold the history with the call's ", x.length(),
                    " tokens, got length ", x.total());
}

void check_sliding_window_attention(const AttentionArguments& x, int64_t window) {
  check_dense_attention(x);
  check_at_least("window", window, 1);
}

void check_merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                        const Tensor& lse_b) {
  check_dims("out_a", out_a, 4);
  check_dims("out_b", out_b, 4);
  check_float("out_a", out_a);
  check_same_kind("out_b", out_b, out_a, "out_a");
  TORCH_CHECK_VALUE(out_b.sizes() == out_a.sizes(), "out_b must have the shape of out_a ",
                    out_a.sizes(), ", got ", out_b.sizes());
  const auto check_lse = [&](const char* name, const Tensor& lse) {
    check_dims(name, lse, 3);
    check_dtype(name, lse, accumulate_type(out_a));
    check_device(name, lse, out_a, "out_a");
    TORCH_CHECK_VALUE(lse.sizes() == out_a.sizes().slice(0, 3), name, " must have shape ",
                      out_a.sizes().slice(0, 3), ", got ", lse.sizes());
  };
  check_lse("lse_a", lse_a);
  check_lse("lse_b", lse_b);
}

void check_select_memory(const Tensor& scores, const Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens) {
  check_dims("scores", scores, 3);
  check_score_type("scores", scores);
  check_at_least("chunk_begin", chunk_begin, 0);
  TORCH_CHECK_VALUE(chunk_end >= chunk_begin, "chunk_end must be >= chunk_begin (", chunk_begin,
                    "), got ", chunk_end);
  check_at_most("chunk_end", chunk_end, kLargestSetting);
  PrefillConfig{
      .local_window = local_window, .heavy_budget = heavy_budget, .sink_tokens = sink_tokens}
      .check();
  check_memory_sets("memory", memory, scores, chunk_end);
}

void check_accumulate_scores(const Tensor& scores, const Tensor& memory, const Tensor& colsum) {
  check_dims("scores", scores, 3);
  check_score_type("scores", scores);
  check_dims("colsum", colsum, 3);
  check_same_kind("colsum", colsum, scores, "scores");
  check_memory_sets("memory", memory, scores, scores.size(2));
  TORCH_CHECK_VALUE(colsum.sizes() == memory.sizes(), "colsum must have the shape of memory ",
                    memory.sizes(), ", got ", colsum.sizes());
  check_no_internal_overlap({"scores", scores});
  check_no_overlap({"scores", scores}, {{"memory", memory}, {"colsum", colsum}});
}

void check_gather_rows(const Tensor& x, const Tensor& indices) {
  check_dims("x", x, 4);
  check_float("x", x);
  check_indices("indices", indices, x);
  for_each_list(indices, [&](const int32_t* list, int64_t width) {
    for (int64_t i = 0; i < width; ++i) check_in_range("indices", list[i], x.size(2));
  });
}

void check_pack_linear(const Tensor& weight, std::string_view format) {
  check_dims("weight", weight, 2);
  check_float("weight", weight);
  TORCH_CHECK_VALUE(weight.numel() > 0 && weight.size(1) % 2 == 0,
                    "weight must have outputs and an even number of inputs, got ",
                    describe(weight));
  TORCH_CHECK_VALUE(format == "bfloat16" || format == "float16" || format == "int8",
                    "format must be bfloat16, float16 or int8, got '", one_line(format), "'");
}

void check_linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
                  const std::optional<Tensor>& bias, int64_t outputs) {
  check_packed(packed, scales, outputs);
  check_strided("x", x);
  check_float("x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == packed.size(1), "x must be [..., ", packed.size(1),
                    "], the inputs of packed, got ", describe(x));
  check_device("x", x, packed, "packed");
  if (!bias) return;
  check_dims("bias", *bias, 1);
  check_float("bias", *bias);
  check_size("bias", *bias, 0, outputs, "outputs");
  check_device("bias", *bias, packed, "packed");
}

void check_packed_embedding(const Tensor& ids, const Tensor& packed, const Tensor& scales,
                            int64_t outputs) {
  check_packed(packed, scales, outputs);
  check_strided("ids", ids);
  check_dtype("ids", ids, at::kLong);
  check_device("ids", ids, packed, "packed");
  if (!ids.is_cpu() || ids.numel() == 0) return;
  const auto [least, most] = at::aminmax(ids);
  check_index("ids", least.item<int64_t>(), outputs);
  check_index("ids", most.item<int64_t>(), outputs);
}

void check_lexical_recall(const Tensor& token_ids, int64_t begin, const PrefillConfig& config,
                          const std::optional<Tensor>& token_text) {
  check_dims("token_ids", token_ids, 2);
  check_dtype("token_ids", token_ids, at::kLong);
  TORCH_CHECK_VALUE(token_ids.size(1) <= std::numeric_limits<int32_t>::max(),
                    "token_ids must have fewer than 2^31 columns, got ", token_ids.size(1));
  check_between("begin", begin, 0, token_ids.size(1));
  check_at_least("recall", config.recall, 1);
  check_token_text(token_text);
}

void check_errors(const Tensor& errors, const Tensor& x, bool is_state) {
  check_dims("errors", errors, 3);
  check_dtype("errors", errors, at::kFloat);
  check_device("errors", errors, x, "the scores or keys");
  const std::vector<int64_t> wanted{x.size(0), x.size(1), kErrorFields};
  TORCH_CHECK_VALUE(errors.sizes() == wanted, "errors must have shape ", at::IntArrayRef(wanted),
                    ", got ", errors.sizes());
  if (!is_state || !errors.is_cpu()) return;
  const auto values = errors.detach().contiguous();
  const float* entry = values.const_data_ptr<float>();
  for (int64_t unit = 0; unit < values.size(0) * values.size(1); ++unit, entry += kErrorFields) {
    const float doublings = entry[kDoublings], sum = entry[kErrorSum];
    const float chunks = entry[kErrorCount], factors = entry[kFactorSum];
    // Written as what must hold, since a NaN makes every comparison false.
    TORCH_CHECK_VALUE(doublings >= 0.0F && std::exp2(doublings) <= kMostWidening &&
                          doublings == std::trunc(doublings) && sum >= 0.0F && std::isfinite(sum) &&
                          chunks >= 0.0F && chunks <= kMostScores && chunks == std::trunc(chunks) &&
                          factors >= chunks && factors <= chunks * kMostWidening,
                      "errors must be [doublings, sum of errors, chunks, sum of factors] of up to ",
                      kMostScores, " chunks and factors of up to ", kMostWidening, ", got [",
                      doublings, ", ", sum, ", ", chunks, ", ", factors, "]");
  }
}

void check_token_text(const std::optional<Tensor>& token_text) {
  if (!token_text) return;
  check_dims("token_text", *token_text, 2);
  check_dtype("token_text", *token_text, at::kInt);
  TORCH_CHECK_VALUE(token_text->is_cpu(), "token_text must be on the CPU, got ",
                    describe(*token_text));
}

}  // namespace h2o_prefill
