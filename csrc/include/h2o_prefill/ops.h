// The operators, as C++ functions. Each goes through the PyTorch dispatcher, to the kernels of the
// tensors' device.
//
// Symbols: B batch, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), T tokens, D key dim, Dv
// value dim, M memory size. Tensors are float32, bfloat16, float16 or float64, all of one dtype and
// device; lse is the natural logarithm of the softmax's denominator; lse, column sums and scores
// are float32 (float64 for float64 inputs). scale is the softmax scale, default D^-0.5. With
// softcap > 0, logits are capped after scaling: softcap * tanh(z / softcap). sinks [Hq], of any of
// these dtypes, add one logit to the softmax of each query head, neither scaled nor capped and
// without a value: it counts once in the denominator of the output, and once for each key set whose
// column sums become scores. All ops but chunkwise_linear_attention are for inference: an
// input that requires a gradient while gradients are on is an error. A wrong argument is a
// c10::ValueError. Results are bitwise the same for any number of threads, except where PyTorch's
// attention computes them (see dense_attention).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "h2o_prefill/config.h"
#include "h2o_prefill/error_fields.h"
#include "h2o_prefill/export.h"

namespace h2o_prefill {

// Phase 1: causal attention inside every chunk of chunk_size tokens.
// q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> out [B, Hq, T, Dv], lse [B, Hq, T],
// colsum [B, Hkv, T], where colsum[j] is the sum over the chunk's queries i and the group's heads
// of exp(z_ij - lse_i).
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size,
    std::optional<double> scale = std::nullopt);

// Phase 2: attention of all queries to the listed keys, without a mask.
// q [B, Hq, T, D], k and v the whole history, indices int32 [B, Hkv, M] (positions, then -1) ->
// out [B, Hq, T, Dv], lse [B, Hq, T], colsum [B, Hkv, M]. Without a key: out 0, lse -inf.
H2O_API std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& indices,
    std::optional<double> scale = std::nullopt);

// Exact causal attention: q [B, Hq, Tq, D] are the last rows of the history k [B, Hkv, T, D],
// v [B, Hkv, T, Dv] -> [B, Hq, Tq, Dv]. Without sinks and softcap PyTorch's attention computes it
// where that is faster: on CPU for fewer than 64 rows of float32 where every query head has its own
// KV head; and for float64.
H2O_API at::Tensor dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   std::optional<double> scale = std::nullopt,
                                   const std::optional<at::Tensor>& sinks = std::nullopt,
                                   double softcap = 0.0);

// The same with a window: the row at position p sees the keys of positions (p - window, p]. k and v
// may hold only the last part of the history, as caches of such layers do: their last key is that
// of the last row. window >= 1. Returns out [B, Hq, Tq, Dv] and lse [B, Hq, Tq], which includes
// sinks. Time is linear in the tokens.
H2O_API std::tuple<at::Tensor, at::Tensor> sliding_window_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale = std::nullopt,
    const std::optional<at::Tensor>& sinks = std::nullopt, double softcap = 0.0);

// Fuses two partial results over disjoint key sets. out_* [B, H, T, Dv], lse_* [B, H, T]; a row
// with lse -inf contributes nothing; both -inf give out 0 and lse -inf.
H2O_API std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a,
                                                        const at::Tensor& lse_a,
                                                        const at::Tensor& out_b,
                                                        const at::Tensor& lse_b);

// Builds the memory set that the chunk after chunk_end attends to: the first sink_tokens positions,
// the last local_window before chunk_end, and of the other candidates (memory and [chunk_begin,
// chunk_end)) the heavy_budget with the highest scores; of equal scores the lower position wins.
// scores [B, Hkv, Ts] (positions >= Ts have score 0), memory int32 [B, Hkv, any] -> int32 [B, Hkv,
// sink_tokens + local_window + heavy_budget], ascending, then -1.
H2O_API at::Tensor select_memory(const at::Tensor& scores, const at::Tensor& memory,
                                 int64_t chunk_begin, int64_t chunk_end, int64_t local_window,
                                 int64_t heavy_budget, int64_t sink_tokens);

// Adds column sums to the scores of memory sets, in place: scores[b, h, memory[b, h, j]] +=
// colsum[b, h, j]. scores [B, Hkv, T], memory int32 [B, Hkv, M] (-1: nothing is added), colsum
// [B, Hkv, M] of the dtype of scores.
H2O_API void accumulate_scores_(at::Tensor& scores, const at::Tensor& memory,
                                const at::Tensor& colsum);

// Copies rows: x [B, H, T, D], indices int32 [B, H, M] -> [B, H, M, D]; rows of -1 are 0.
H2O_API at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& indices);

// Packs the weight [outputs, even inputs] of a linear layer as the kernels read it, from memory or
// from a mapped file, whatever the CPU. format: "bfloat16", "float16" or "int8" -> packed
// [ceil(outputs / 16), inputs, 16] of that dtype, and fp32 scales: [outputs] of int8 (the largest
// magnitude of an output is 127 times its scale), else [0]. Outputs lie in panels of 16: in each
// [inputs][16], but of bfloat16 [inputs / 2][16][2].
H2O_API std::tuple<at::Tensor, at::Tensor> pack_linear(const at::Tensor& weight,
                                                       std::string_view format);

// x [..., inputs] weight^T + bias [outputs] -> [..., outputs] of the dtype of x. Products of packed
// weights, x and bias are added in float32 (float64 if x is). Weights are read where they lie.
H2O_API at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                          const std::optional<at::Tensor>& bias, int64_t outputs);

// Rows of a packed weight: ids int64 [...], below `outputs` -> fp32 [..., inputs].
H2O_API at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                                    const at::Tensor& scales, int64_t outputs);

// Ragged lists of recalled keys over blocks of rows, all int32: offsets [B * n_blocks + 1],
// positions [nnz] and visible_from [nnz] (absolute positions); a block has each position once, in
// ascending order of visible_from. Undefined tensors: nothing is recalled.
struct RecallLists {
  at::Tensor offsets = {};
  at::Tensor positions = {};
  at::Tensor visible_from = {};
};

// The state that one layer carries from one call of a prompt to the next. Undefined tensors at
// first.
struct PrefillState {
  at::Tensor scores = {};        // [B, Hkv, <= T_total]
  at::Tensor memory = {};        // int32 [B, Hkv, any], ascending, then -1
  int64_t last_chunk_begin = 0;  // position where the last sparse chunk began
  at::Tensor errors = {};        // fp32 [B, Hkv, kErrorFields]; undefined: none so far
};

// One layer's whole sparse prefill. q [B, Hq, T, D] are the call's queries, k and v the whole
// history, which ends with the call's tokens. state: as the prompt's previous call returned it.
// settings: of the layer (config.of_layer()); the fields that decide between dense and sparse are
// ignored. recall: the call's result of lexical_recall. The last dense_tail queries attend to
// every key before them. Returns out [B, Hq, T, Dv] and the state: scores of all T_total positions,
// the memory set that the last chunk attended to, [B, Hkv, settings.memory_size()], and errors.
H2O_API std::tuple<at::Tensor, PrefillState> chunked_sparse_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PrefillState& state,
    const PrefillConfig& settings, const RecallLists& recall = {},
    std::optional<double> scale = std::nullopt,
    const std::optional<at::Tensor>& sinks = std::nullopt, double softcap = 0.0);

// The buffers of one layer for prefill_attention_(), allocated by the caller. What a call writes
// must not share memory with another argument.
struct PrefillBuffers {
  at::Tensor key = {};    // [B, Hkv, capacity, D]
  at::Tensor value = {};  // [B, Hkv, capacity, Dv]
  // [B, Hkv, capacity], contiguous, 0 at first; a dense layer needs none: empty
  at::Tensor scores = {};
  // int32 [B, Hkv, memory_size() of the layer's settings or more], contiguous, -1 at first
  at::Tensor memory = {};
  // fp32 [B, Hkv, kErrorFields], contiguous, 0 at first; needed where the settings have error_rows
  at::Tensor errors = {};
};

// What the chunk after each multiple of the chunk size S needs of the prompt before it, for one
// layer and a call of T tokens: checkpoint i, of T / S, is the state after the call's first (i + 1)
// S tokens. The next memory set is memory[i], int32 [B, Hkv, memory_size()], -1 where absent;
// scores[i], like the scores of the buffers, has what its positions received so far; errors[i] is
// fp32 [B, Hkv, kErrorFields]. All contiguous, allocated by the caller, no memory shared with each
// other or another argument.
struct Checkpoints {
  at::Tensor memory = {};  // undefined: none are kept
  at::Tensor scores = {};
  at::Tensor errors = {};
};

// What the attention of one layer takes besides tensors and state.
struct LayerOptions {
  int64_t layer = 0;
  std::string_view settings = {};  // of the model, a text that PrefillConfig::parse() reads
  std::optional<double> scale = {};
  std::optional<at::Tensor> sinks = {};
  double softcap = 0.0;
  RecallLists recall = {};  // ignored by a dense call
  // Of a layer with a sliding window, >= 1: calls whose history is longer are exact, as
  // sliding_window_attention() computes them.
  std::optional<int64_t> window = {};
};

// One layer's attention of one call, in place: writes k [B, Hkv, T, D] and v [B, Hkv, T, Dv] of the
// call's tokens into the buffers, attends with q [B, Hq, T, D], sparsely or densely as the settings
// say, and updates scores and memory. k and v undefined: the buffers have these rows already.
// position: int64 [2] on the CPU, the tokens before the call and where the last sparse chunk began
// (0 and 0 at first), the same for all layers of a model; advance_position_() moves it past a call.
// checkpoints: written by a sparse call. Returns [B, Hq, T, Dv]. A call that throws because of its
// arguments changes nothing.
H2O_API at::Tensor prefill_attention_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      PrefillBuffers& buffers, const at::Tensor& position,
                                      const LayerOptions& options,
                                      const Checkpoints& checkpoints = {});

// Advances a position past a call of num_tokens tokens.
H2O_API void advance_position_(at::Tensor& position, int64_t num_tokens, std::string_view settings);

// Lexical recall: finds earlier matches of the n-gram that ends at each new token. token_ids
// int64 [B, T_total]; tokens from `begin` on are new. For a token at p of a chunk that begins at c,
// the longest n-gram (two tokens at most) that ends at p and also at positions e < c gives its
// `recall` latest matches; a single token counts only if it occurs at most 32 times up to p. The
// positions e to e + 3 before c are recalled, visible from p on, in blocks of
// config.recall_block() new tokens.
//
// With recall_characters = n > 0 and token_text, the last n characters of the text up to token p
// are looked up as well: each of the character_matches latest matches that end before c recalls
// character_span positions, from the token that holds the next character on. token_text: int32
// [vocabulary, any] on the CPU, the characters of each token, then 0. If it leaves out case, spaces
// and punctuation, so does the comparison. Tokens without characters recall nothing by characters.
H2O_API RecallLists lexical_recall(const at::Tensor& token_ids, int64_t begin,
                                   const PrefillConfig& config, const at::Tensor& token_text = {});

// The same for a call of num_tokens tokens at a position of prefill_attention_(), with the settings
// of the model. token_ids int64 [B, capacity]: the prompt up to the end of the call; later columns
// are ignored. The lists of a dense call are empty.
H2O_API RecallLists recall_at_position(const at::Tensor& token_ids, const at::Tensor& position,
                                       int64_t num_tokens, std::string_view settings,
                                       const at::Tensor& token_text = {});

// The state that linear attention carries from one call of a sequence to the next, float32 (float64
// for float64 inputs). Undefined tensors at first.
struct LinearState {
  at::Tensor state = {};       // [B, Hkv, D, Dv]
  at::Tensor normalizer = {};  // [B, Hkv, D]; [B, Hkv, 0] for a call without a normaliser
};

struct LinearAttentionOptions {
  std::string feature_map = "elu+1";  // or "relu", "identity"
  int64_t chunk_size = 64;            // does not change the result beyond rounding
  bool causal = true;                 // false: the sum of both directions, without initial states
  bool normalize = false;
  std::optional<double> scale = {};  // default 1; cancels out where the output is normalised
};

// Linear attention, chunk by chunk in linear time: S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i, out_i =
// scale phi(q_i) S_i; normalised, out_i = phi(q_i) S_i / (phi(q_i) . z_i) with z_i = exp(g_i)
// z_{i-1} + phi(k_i), and 0 where the divisor is 0. q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv,
// T, Dv]; log_decay g <= 0, [Hkv] or [B, Hkv, T], of the dtype of the state; undefined: 0. A call
// of one token with a state is a decoding step. Differentiable once in all tensors. Returns out [B,
// Hq, T, Dv] and the state after the last token, of the forward direction.
H2O_API std::tuple<at::Tensor, LinearState> chunkwise_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay = {},
    const LinearState& initial = {}, const LinearAttentionOptions& options = {});

}  // namespace h2o_prefill
