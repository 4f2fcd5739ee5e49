#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "common/tensors.h"
#include "kernels/composite/linear_attention.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/linear_chunk.h"
#include "kernels/cpu/linear_gradient.h"
#include "kernels/cpu/linear_pieces.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {
namespace {

// One direction of a call. States are float32 and contiguous; null: 0, or not wanted.
struct LinearCall {
  HeadsView query;
  HeadsView key;
  HeadsView value;
  HeadsView out;
  const float* log_decay;  // null: none
  int64_t decay_strides[3];
  const float* state;
  const float* normalizer;
  float* last_state;
  float* last_normalizer;
  FeatureMap feature_map;
  bool normalize;
  float scale;
  int64_t chunk_size;

  // The same call from the last token to the first.
  LinearCall reversed() const;
};

LinearCall LinearCall::reversed() const {
  LinearCall call = *this;
  for (HeadsView* view : {&call.query, &call.key, &call.value, &call.out}) {
    view->data = view->row(0, 0, view->length - 1);
    view->stride_row = -view->stride_row;
  }
  if (call.log_decay) {
    call.log_decay += (call.key.length - 1) * call.decay_strides[2];
    call.decay_strides[2] = -call.decay_strides[2];
  }
  return call;
}

class LinearAttention {
 public:
  explicit LinearAttention(const LinearCall& call)
      : call_(call),
        units_(call.key.batch * call.key.heads),
        group_(call.query.heads / call.key.heads),
        state_floats_(kernels_.state_floats(call.key.dim, call.value.dim)),
        chunk_(std::min(call.chunk_size, call.key.length)) {
    const LinearPieces pieces(units_, call.key.length, chunk_, state_floats_);
    piece_chunks_ = pieces.chunks;
    pieces_ = pieces.count;
  }

  void run() {
    const int64_t threads = work() < kSerialWork ? 1 : at::get_num_threads();
    scratch_floats_ = Workspace::whole_lines<float>(
        kernels_.scratch_floats(call_.key.dim, call_.value.dim, chunk_));
    scratch_ = workspace_.add<float>(threads * scratch_floats_);
    sums_ = workspace_.add<float>(threads * state_floats_);
    if (heads_suffice(threads)) {
      starts_ = workspace_.add<float>(threads * state_floats_);
      workspace_.allocate();
      for_each_task(TaskRange{units_}, threads,
                    [&](int64_t unit, int64_t thread) { run_unit(unit, thread); });
      return;
    }
    starts_ = workspace_.add<float>(units_ * pieces_ * state_floats_);
    log_decays_ = workspace_.add<float>(units_ * pieces_);
    workspace_.allocate();
    for_each_task(TaskRange{units_ * (pieces_ - 1)}, threads, [&](int64_t task, int64_t thread) {
      const int64_t unit = task / (pieces_ - 1), piece = task % (pieces_ - 1);
      *log_decay(unit, piece) =
          run_piece(unit, piece, nullptr, start(unit, piece + 1), thread, /*attends=*/false);
    });
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { join_pieces(unit); });
    for_each_task(TaskRange{units_ * pieces_}, threads, [&](int64_t task, int64_t thread) {
      const int64_t unit = task / pieces_, piece = task % pieces_;
      const float* const before = piece > 0 || call_.state ? start(unit, piece) : nullptr;
      float* const sum = workspace_.get(sums_) + thread * state_floats_;
      const float decayed = run_piece(unit, piece, before, sum, thread, /*attends=*/true);
      if (piece + 1 < pieces_) return;
      if (before) kernels_.add_earlier(before, decayed, state_floats_, sum);
      write_state(unit, sum);
    });
  }

 private:
  // Multiply-adds of the state a token, and of all else.
  int64_t state_work() const { return call_.key.dim * call_.value.dim; }
  int64_t query_work() const {
    return group_ * (state_work() + chunk_ * (call_.key.dim + call_.value.dim) / 2);
  }
  int64_t work() const { return units_ * call_.key.length * (state_work() + query_work()); }

  // Whether whole heads as tasks take less time than pieces, whose states are computed twice.
  bool heads_suffice(int64_t threads) const {
    if (threads == 1 || pieces_ == 1) return true;
    const double whole = static_cast<double>(divide_up(units_, threads));
    const double twice = static_cast<double>(state_work()) / (state_work() + query_work());
    return whole * threads <= units_ * (1 + twice);
  }

  float* start(int64_t unit, int64_t piece) const {
    return workspace_.get(starts_) + (unit * pieces_ + piece) * state_floats_;
  }
  float* log_decay(int64_t unit, int64_t piece) const {
    return workspace_.get(log_decays_) + unit * pieces_ + piece;
  }

  void read_state(int64_t unit, float* packed) const {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim;
    kernels_.pack_state(call_.state + unit * dim * value_dim,
                        call_.normalizer ? call_.normalizer + unit * dim : nullptr, dim, value_dim,
                        packed);
  }
  void write_state(int64_t unit, const float* packed) const {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim;
    kernels_.unpack_state(packed, dim, value_dim, call_.last_state + unit * dim * value_dim,
                          call_.last_normalizer ? call_.last_normalizer + unit * dim : nullptr);
  }

  // All pieces of a KV head in turn.
  void run_unit(int64_t unit, int64_t thread) const {
    float* before = workspace_.get(starts_) + thread * state_floats_;
    float* sum = workspace_.get(sums_) + thread * state_floats_;
    bool has_state = call_.state != nullptr;
    if (has_state) read_state(unit, before);
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      const float decayed =
          run_piece(unit, piece, has_state ? before : nullptr, sum, thread, /*attends=*/true);
      if (has_state) kernels_.add_earlier(before, decayed, state_floats_, sum);
      std::swap(before, sum);
      has_state = true;
    }
    write_state(unit, before);
  }

  // From what each piece brings to the state before it.
  void join_pieces(int64_t unit) const {
    if (call_.state) read_state(unit, start(unit, 0));
    for (int64_t piece = call_.state ? 0 : 1; piece + 1 < pieces_; ++piece) {
      kernels_.add_earlier(start(unit, piece), *log_decay(unit, piece), state_floats_,
                           start(unit, piece + 1));
    }
  }

  // Leaves in `sum` what the piece brings, and returns its log decay.
  float run_piece(int64_t unit, int64_t piece, const float* before, float* sum, int64_t thread,
                  bool attends) const {
    const int64_t b = unit / call_.key.heads, h = unit % call_.key.heads;
    const int64_t first = piece * piece_chunks_ * chunk_;
    const int64_t end = std::min(first + piece_chunks_ * chunk_, call_.key.length);
    float decayed = 0.0F;
    for (int64_t row = first; row < end; row += chunk_) {
      decayed += kernels_.linear_chunk(
          {.dtype = call_.key.dtype,
           .out_dtype = call_.out.dtype,
           .feature_map = call_.feature_map,
           .normalize = call_.normalize,
           .scale = call_.scale,
           .rows = std::min(chunk_, end - row),
           .rows_behind = std::clamp<int64_t>(end - row - chunk_, 0, chunk_),
           .key_dim = call_.key.dim,
           .value_dim = call_.value.dim,
           .key = call_.key.row(b, h, row),
           .key_stride = call_.key.stride_row,
           .value = call_.value.row(b, h, row),
           .value_stride = call_.value.stride_row,
           .log_decay = call_.log_decay
                            ? call_.log_decay + b * call_.decay_strides[0] +
                                  h * call_.decay_strides[1] + row * call_.decay_strides[2]
                            : nullptr,
           .decay_stride = call_.decay_strides[2],
           .heads = attends ? group_ : 0,
           .query = call_.query.row(b, h * group_, row),
           .query_stride = call_.query.stride_row,
           .query_head_stride = call_.query.stride_head,
           .out = call_.out.row(b, h * group_, row),
           .out_stride = call_.out.stride_row,
           .out_head_stride = call_.out.stride_head,
           .start = before,
           .start_log_decay = decayed,
           .sum = sum,
           .sum_is_zero = row == first,
           .scratch = workspace_.get(scratch_) + thread * scratch_floats_});
    }
    return decayed;
  }

  const LinearKernels& kernels_ = *cpu_kernels().linear;
  const LinearCall& call_;
  int64_t units_;
  int64_t group_;  // query heads of a KV head
  int64_t state_floats_;
  int64_t chunk_;  // tokens
  int64_t piece_chunks_;
  int64_t pieces_;  // of a KV head
  int64_t scratch_floats_ = 0;
  Workspace workspace_;
  Workspace::Part<float> scratch_;     // [threads, scratch_floats_]
  Workspace::Part<float> sums_;        // [threads, state_floats_]
  Workspace::Part<float> starts_;      // [threads or units * pieces, state_floats_]
  Workspace::Part<float> log_decays_;  // [units, pieces]
};

// Runs one direction; returns the states behind the last token, [B, Hkv, D, Dv] and [B, Hkv, D].
std::pair<at::Tensor, at::Tensor> run(const at::Tensor& q_argument, const at::Tensor& k_argument,
                                      const at::Tensor& v_argument, const at::Tensor& log_decay,
                                      const at::Tensor& state_argument,
                                      const at::Tensor& normalizer_argument, const at::Tensor& out,
                                      FeatureMap feature_map, int64_t chunk_size, bool normalize,
                                      double scale, bool reverse) {
  const auto q = with_contiguous_rows(q_argument);
  const auto k = with_contiguous_rows(k_argument);
  const auto v = with_contiguous_rows(v_argument);
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto data = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<float>() : nullptr;
  };
  const auto state = contiguous(state_argument), normalizer = contiguous(normalizer_argument);
  const auto options = k.options().dtype(at::kFloat);
  auto last_state = at::empty({k.size(0), k.size(1), k.size(3), v.size(3)}, options);
  auto last_normalizer = at::empty({k.size(0), k.size(1), normalize ? k.size(3) : 0}, options);
  if (k.size(0) == 0 || k.size(2) == 0) {
    // Without tokens the states stay as they are.
    state.defined() ? last_state.copy_(state) : last_state.zero_();
    normalizer.defined() ? last_normalizer.copy_(normalizer) : last_normalizer.zero_();
    return {last_state, last_normalizer};
  }
  LinearCall call{
      .query = heads_view(q),
      .key = heads_view(k),
      .value = heads_view(v),
      .out = heads_view(out),
      .log_decay = data(log_decay),
      .decay_strides = {},
      .state = data(state),
      .normalizer = data(normalizer),
      .last_state = last_state.mutable_data_ptr<float>(),
      .last_normalizer = normalize ? last_normalizer.mutable_data_ptr<float>() : nullptr,
      .feature_map = feature_map,
      .normalize = normalize,
      .scale = static_cast<float>(scale),
      .chunk_size = chunk_size};
  for (int i = 0; log_decay.defined() && i < 3; ++i) call.decay_strides[i] = log_decay.stride(i);
  if (reverse) call = call.reversed();
  LinearAttention(call).run();
  return {last_state, last_normalizer};
}

composite::Scanned scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& log_decay, const at::Tensor& state, int64_t chunk_size,
                        bool reverse) {
  auto out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const auto states = run(q, k, v, log_decay, state, {}, out, FeatureMap::kIdentity, chunk_size,
                          /*normalize=*/false, /*scale=*/1.0, reverse);
  return {out, states.first};
}

composite::LinearScan scan_of(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? &composite::linear_scan : &scan;
}

LinearAttentionResult attend(const LinearAttentionRequest& r) {
  if (!r.causal || r.query.scalar_type() == at::kDouble) {
    return composite::linear_attention(r, scan_of(r.query));
  }
  auto out = empty_heads(r.query.size(0), r.query.size(1), r.length(), r.value.size(3), r.query);
  const auto [state, normalizer] =
      run(r.query, r.key, r.value, r.decay_by_token(), r.state, r.normalizer, out, r.feature_map,
          r.chunk_size, r.normalize, r.scale, /*reverse=*/false);
  return {out, state, normalizer};
}

LinearAttentionInputGradients differentiate(const LinearAttentionRequest& r,
                                            const LinearAttentionGradients& gradients) {
  const bool fused = r.causal && r.query.scalar_type() != at::kDouble && r.query.numel() > 0;
  return fused ? linear_attention_gradient(r, gradients)
               : composite::linear_attention_backward(r, gradients, scan_of(r.query));
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&differentiate>);
}

}  // namespace
}  // namespace h2o_prefill
