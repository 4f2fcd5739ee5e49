// The argument checks of every op. Each entry calls them first, so that no caller can skip them.
// Values of position lists are checked where the host can read them; on other devices kernels
// ignore positions out of range.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <string_view>

#include "common/attention.h"
#include "h2o_prefill/config.h"

namespace h2o_prefill {

struct NamedTensor {
  const char* name;
  const at::Tensor& tensor;
};

// Throws c10::ValueError that names a tensor written in place if it is expanded.
void check_no_internal_overlap(const NamedTensor& written);

// Throws c10::ValueError that names both if `written` shares memory with one of `others`. Parts of
// one tensor pass if they have no element in common.
void check_no_overlap(const NamedTensor& written, c10::ArrayRef<NamedTensor> others);

// q [B, Hq, T, D], k [B, Hkv, *, D] and v [B, Hkv, *, Dv], of one dtype and device; and the
// softmax scale, which must be finite.
void check_qkv(const AttentionArguments& x);

// sinks: floating point [Hq], on the device of the query. softcap: finite, not negative.
void check_logit_options(const AttentionArguments& x);

// [B, Hkv, *] of this dtype for x [B, Hkv, ...], on its device, which `of` describes.
void check_per_kv_head(const char* name, const at::Tensor& t, const at::Tensor& x,
                       at::ScalarType dtype, const char* of);

// int32 [B, Hkv, M] for x, on its device: memory sets, so strictly ascending positions below
// `length`, then -1.
void check_memory_sets(const char* name, const at::Tensor& memory, const at::Tensor& x,
                       int64_t length);

void check_merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                        const at::Tensor& lse_b);

void check_select_memory(const at::Tensor& scores, const at::Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens);

void check_accumulate_scores(const at::Tensor& scores, const at::Tensor& memory,
                             const at::Tensor& colsum);

void check_gather_rows(const at::Tensor& x, const at::Tensor& indices);

void check_pack_linear(const at::Tensor& weight, std::string_view format);

void check_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                  const std::optional<at::Tensor>& bias, int64_t outputs);

void check_packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                            const at::Tensor& scales, int64_t outputs);

// fp32 [B, Hkv, kErrorFields] for x [B, Hkv, ...], on its device. is_state: whether the values
// describe a prompt.
void check_errors(const at::Tensor& errors, const at::Tensor& x, bool is_state = true);

void check_token_text(const std::optional<at::Tensor>& token_text);

void check_lexical_recall(const at::Tensor& token_ids, int64_t begin, const PrefillConfig& config,
                          const std::optional<at::Tensor>& token_text);

}  // namespace h2o_prefill
