#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/tensors.h"
#include "kernels/composite/linear_attention.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/linear_chunk.h"
#include "kernels/cpu/linear_pieces.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {
namespace {

// Calls of at most this many tokens run token by token: packing states for a chunk would take
// longer.
constexpr int64_t kFewTokens = 8;

// A task interleaves its KV heads chunk by chunk, so that rows that hold all heads are read
// sequentially. Upper bound on the L2 memory of their states.
constexpr int64_t kTaskStateBytes = int64_t{1} << 20;

// One direction of a call. States are float32 and contiguous. Null input: zero; null output: not
// computed.
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
        streams_out_(exceeds_caches(call.out)) {
    const LinearPieces pieces(units_, call.key.length, state_floats_);
    chunk_ = pieces.chunk;
    piece_chunks_ = pieces.chunks;
    pieces_ = pieces.count;
  }

  void run() {
    const int64_t threads = work() < kSerialWork ? 1 : at::get_num_threads();
    if (call_.key.length <= kFewTokens) return run_tokens(threads);
    scratch_floats_ = Workspace::whole_lines<float>(
        kernels_.scratch_floats(call_.key.dim, call_.value.dim, chunk_));
    scratch_ = workspace_.add<float>(threads * scratch_floats_);
    heads_ = heads_of_task(threads);
    sums_ = workspace_.add<float>(threads * heads_ * state_floats_);
    const TaskRange groups{divide_up(units_, heads_)};
    if (heads_suffice(threads)) {
      starts_ = workspace_.add<float>(threads * heads_ * state_floats_);
      workspace_.allocate();
      for_each_task(groups, threads,
                    [&](int64_t group, int64_t thread) { run_all_pieces(group, thread); });
      return;
    }
    starts_ = workspace_.add<float>(units_ * pieces_ * state_floats_);
    log_decays_ = workspace_.add<float>(units_ * pieces_);
    workspace_.allocate();
    for_each_task(TaskRange{groups.tasks * (pieces_ - 1)}, threads,
                  [&](int64_t task, int64_t thread) {
                    sum_piece(task % groups.tasks, task / groups.tasks, thread);
                  });
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { join_pieces(unit); });
    for_each_task(TaskRange{groups.tasks * pieces_}, threads, [&](int64_t task, int64_t thread) {
      attend_piece(task % groups.tasks, task / groups.tasks, thread);
    });
  }

 private:
  // Multiply-adds per token: for the state, and for everything else.
  int64_t state_work() const { return call_.key.dim * call_.value.dim; }
  int64_t query_work() const {
    return group_ * (state_work() + chunk_ * (call_.key.dim + call_.value.dim) / 2);
  }
  int64_t work() const { return units_ * call_.key.length * (state_work() + query_work()); }

  // Whether tasks of whole heads take less time than tasks of pieces, which compute states twice.
  bool heads_suffice(int64_t threads) const {
    if (threads == 1 || pieces_ == 1) return true;
    const double whole = static_cast<double>(divide_up(units_, threads));
    const double twice = static_cast<double>(state_work()) / (state_work() + query_work());
    return whole * threads <= units_ * (1 + twice);
  }

  // KV heads of a task: the largest number that gives every thread the same number of tasks.
  int64_t heads_of_task(int64_t threads) const {
    const int64_t bytes = 2 * state_floats_ * static_cast<int64_t>(sizeof(float));
    const int64_t fitting = std::max<int64_t>(kTaskStateBytes / bytes, 1);
    if (heads_suffice(threads)) {
      const int64_t of_thread = divide_up(units_, threads);
      return divide_up(of_thread, divide_up(of_thread, fitting));
    }
    const int64_t many = units_ * pieces_ / (kTasksPerThread * threads);
    return std::clamp<int64_t>(many, 1, std::min(units_, fitting));
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

  void run_tokens(int64_t threads) {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim, rows = call_.key.length;
    scratch_floats_ =
        Workspace::whole_lines<float>(kernels_.token_scratch_floats(dim, value_dim, rows, group_));
    scratch_ = workspace_.add<float>(threads * scratch_floats_);
    workspace_.allocate();
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t thread) {
      const auto part = [&](auto* whole, int64_t floats) {
        return whole ? whole + unit * floats : nullptr;
      };
      kernels_.linear_tokens(chunk_args(unit, 0, rows, thread),
                             {.state = part(call_.state, dim * value_dim),
                              .normalizer = part(call_.normalizer, dim),
                              .last_state = part(call_.last_state, dim * value_dim),
                              .last_normalizer = part(call_.last_normalizer, dim)});
    });
  }

  // A KV head of a task.
  struct Head {
    int64_t unit;
    const float* before;     // its state before the piece; null: 0
    float* sum;              // contribution of the piece
    float log_decay = 0.0F;  // of the piece
  };

  // The KV heads of a group; before(unit, index in the group) and sum(unit, index).
  template <typename Before, typename Sum>
  std::vector<Head> heads_of(int64_t group, const Before& before, const Sum& sum) const {
    std::vector<Head> heads;
    const int64_t first = group * heads_;
    for (int64_t unit = first; unit < std::min(first + heads_, units_); ++unit) {
      heads.push_back({unit, before(unit, unit - first), sum(unit, unit - first)});
    }
    return heads;
  }

  void run_all_pieces(int64_t group, int64_t thread) const {
    float* befores = workspace_.get(starts_) + thread * heads_ * state_floats_;
    float* sums = workspace_.get(sums_) + thread * heads_ * state_floats_;
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      auto heads = heads_of(
          group,
          [&](int64_t unit, int64_t i) -> const float* {
            if (piece == 0 && !call_.state) return nullptr;
            float* const before = befores + i * state_floats_;
            if (piece == 0) read_state(unit, before);
            return before;
          },
          [&](int64_t, int64_t i) { return sums + i * state_floats_; });
      run_piece(heads, piece, thread, /*attends=*/true);
      for (const Head& head : heads) {
        add_before(head);
        if (piece + 1 == pieces_) write_state(head.unit, head.sum);
      }
      std::swap(befores, sums);
    }
  }

  void sum_piece(int64_t group, int64_t piece, int64_t thread) const {
    auto heads = heads_of(
        group, [](int64_t, int64_t) { return nullptr; },
        [&](int64_t unit, int64_t) { return start(unit, piece + 1); });
    run_piece(heads, piece, thread, /*attends=*/false);
    for (const Head& head : heads) *log_decay(head.unit, piece) = head.log_decay;
  }

  void attend_piece(int64_t group, int64_t piece, int64_t thread) const {
    float* const sums = workspace_.get(sums_) + thread * heads_ * state_floats_;
    auto heads = heads_of(
        group,
        [&](int64_t unit, int64_t) -> const float* {
          return piece > 0 || call_.state ? start(unit, piece) : nullptr;
        },
        [&](int64_t, int64_t i) { return sums + i * state_floats_; });
    run_piece(heads, piece, thread, /*attends=*/true);
    if (piece + 1 < pieces_) return;
    for (const Head& head : heads) {
      add_before(head);
      write_state(head.unit, head.sum);
    }
  }

  void add_before(const Head& head) const {
    if (head.before) kernels_.add_earlier(head.before, head.log_decay, state_floats_, head.sum);
  }

  // Turns each piece's contribution into the state before that piece.
  void join_pieces(int64_t unit) const {
    if (call_.state) read_state(unit, start(unit, 0));
    for (int64_t piece = call_.state ? 0 : 1; piece + 1 < pieces_; ++piece) {
      kernels_.add_earlier(start(unit, piece), *log_decay(unit, piece), state_floats_,
                           start(unit, piece + 1));
    }
  }

  // Writes each head's contribution of the piece to its sum; returns the log decay of the piece.
  void run_piece(std::vector<Head>& heads, int64_t piece, int64_t thread, bool attends) const {
    const int64_t first = piece * piece_chunks_ * chunk_;
    const int64_t end = std::min(first + piece_chunks_ * chunk_, call_.key.length);
    for (int64_t row = first; row < end; row += chunk_) {
      for (size_t i = 0; i < heads.size(); ++i) {
        Head& head = heads[i];
        auto args = chunk_args(head.unit, row, std::min(row + chunk_, end), thread);
        args.heads = attends ? group_ : 0;
        const bool is_last = i + 1 == heads.size();
        set_next(heads[is_last ? 0 : i + 1].unit, is_last ? row + chunk_ : row, args);
        args.start = head.before;
        args.start_log_decay = head.log_decay;
        args.sum = head.sum;
        args.sum_is_zero = row == first;
        head.log_decay += kernels_.linear_chunk(args);
      }
    }
  }

  void set_next(int64_t unit, int64_t row, LinearChunkArgs& args) const {
    const int64_t b = unit / call_.key.heads, h = unit % call_.key.heads;
    args.next_rows = std::clamp<int64_t>(call_.key.length - row, 0, chunk_);
    if (args.next_rows == 0) return;
    args.next_key = call_.key.row(b, h, row);
    args.next_value = call_.value.row(b, h, row);
    args.next_query = call_.query.row(b, h * group_, row);
  }

  // Computes the outputs of tokens [row, end) for a KV head and its query heads.
  LinearChunkArgs chunk_args(int64_t unit, int64_t row, int64_t end, int64_t thread) const {
    const int64_t b = unit / call_.key.heads, h = unit % call_.key.heads;
    return {.dtype = call_.key.dtype,
            .out_dtype = call_.out.dtype,
            .feature_map = call_.feature_map,
            .normalize = call_.normalize,
            .scale = call_.scale,
            .rows = end - row,
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
            .heads = group_,
            .query = call_.query.row(b, h * group_, row),
            .query_stride = call_.query.stride_row,
            .query_head_stride = call_.query.stride_head,
            .out = call_.out.row(b, h * group_, row),
            .out_stride = call_.out.stride_row,
            .out_head_stride = call_.out.stride_head,
            .next_rows = 0,
            .next_key = nullptr,
            .next_value = nullptr,
            .next_query = nullptr,
            .streams_out = streams_out_,
            .start = nullptr,
            .start_log_decay = 0.0F,
            .sum = nullptr,
            .sum_is_zero = true,
            .scratch = workspace_.get(scratch_) + thread * scratch_floats_};
  }

  const LinearKernels& kernels_ = *cpu_kernels().linear;
  const LinearCall& call_;
  int64_t units_;
  int64_t group_;  // query heads of a KV head
  int64_t state_floats_;
  int64_t chunk_;  // tokens
  bool streams_out_;
  int64_t heads_ = 1;  // of a task; the last one may have fewer
  int64_t piece_chunks_;
  int64_t pieces_;  // of a KV head
  int64_t scratch_floats_ = 0;
  Workspace workspace_;
  Workspace::Part<float> scratch_;     // [threads, scratch_floats_]
  Workspace::Part<float> sums_;        // [threads, heads_, state_floats_]
  Workspace::Part<float> starts_;      // [threads, heads_, ...] or [units, pieces, ...]
  Workspace::Part<float> log_decays_;  // [units, pieces]
};

// Runs one direction; returns the states after the last token, [B, Hkv, D, Dv] and [B, Hkv, D].
std::pair<at::Tensor, at::Tensor> run(const at::Tensor& q_argument, const at::Tensor& k_argument,
                                      const at::Tensor& v_argument, const at::Tensor& log_decay,
                                      const at::Tensor& state_argument,
                                      const at::Tensor& normalizer_argument, const at::Tensor& out,
                                      FeatureMap feature_map, bool normalize, double scale,
                                      bool reverse) {
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
      .scale = static_cast<float>(scale)};
  for (int i = 0; log_decay.defined() && i < 3; ++i) call.decay_strides[i] = log_decay.stride(i);
  if (reverse) call = call.reversed();
  LinearAttention(call).run();
  return {last_state, last_normalizer};
}

composite::Scanned scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& log_decay, const at::Tensor& state,
                        int64_t /*chunk_size*/, bool reverse) {
  auto out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const auto states = run(q, k, v, log_decay, state, {}, out, FeatureMap::kIdentity,
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
          r.normalize, r.scale, /*reverse=*/false);
  return {out, state, normalizer};
}

LinearAttentionInputGradients attend_backward(const LinearAttentionRequest& r,
                                              const LinearAttentionGradients& gradients) {
  return composite::linear_attention_backward(r, gradients, scan_of(r.query));
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunkwise_linear_attention", &chunkwise_linear_attention_entry<&attend>);
  m.impl("chunkwise_linear_attention_backward",
         &chunkwise_linear_attention_backward_entry<&attend_backward>);
}

}  // namespace
}  // namespace h2o_prefill
