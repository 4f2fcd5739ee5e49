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

// Results of at least so many bytes are too large to be read again from a cache.
constexpr int64_t kStreamedBytes = int64_t{8} << 20;

// The same call from the last token to the first.
LinearAttentionParams reversed(LinearAttentionParams call) {
  for (HeadsView* view : {&call.query, &call.key, &call.value, &call.out}) {
    *view = view->reversed();
  }
  if (call.log_decay) {
    call.log_decay += (call.key.length - 1) * call.decay_stride_row;
    call.decay_stride_row = -call.decay_stride_row;
  }
  return call;
}

class LinearAttention {
 public:
  explicit LinearAttention(const LinearAttentionParams& call)
      : call_(call),
        units_(call.key.batch * call.key.heads),
        group_(call.query.heads / call.key.heads),
        state_floats_(kernels_.state_floats(call.key.dim, call.value.dim)),
        streams_out_(call.query.batch * call.query.heads * call.query.length * call.out.dim *
                         size_of(call.out.dtype) >=
                     kStreamedBytes),
        pieces_(units_, call.key.length, state_floats_) {}

  void run() {
    const int64_t threads = work() < kSerialWork ? 1 : at::get_num_threads();
    if (call_.key.length <= kFewTokens) return run_tokens(threads);
    scratch_floats_ = Workspace::whole_lines<float>(
        kernels_.scratch_floats(call_.key.dim, call_.value.dim, pieces_.chunk));
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
    starts_ = workspace_.add<float>(units_ * pieces_.count * state_floats_);
    log_decays_ = workspace_.add<float>(units_ * pieces_.count);
    workspace_.allocate();
    for_each_task(TaskRange{groups.tasks * (pieces_.count - 1)}, threads,
                  [&](int64_t task, int64_t thread) {
                    sum_piece(task % groups.tasks, task / groups.tasks, thread);
                  });
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { join_pieces(unit); });
    for_each_task(TaskRange{groups.tasks * pieces_.count}, threads,
                  [&](int64_t task, int64_t thread) {
                    attend_piece(task % groups.tasks, task / groups.tasks, thread);
                  });
  }

 private:
  // Multiply-adds per token: for the state, and for everything else.
  int64_t state_work() const { return call_.key.dim * call_.value.dim; }
  int64_t query_work() const {
    return group_ * (state_work() + pieces_.chunk * (call_.key.dim + call_.value.dim) / 2);
  }
  int64_t work() const { return units_ * call_.key.length * (state_work() + query_work()); }

  // Whether tasks of whole heads take less time than tasks of pieces, which compute states twice.
  bool heads_suffice(int64_t threads) const {
    const double twice = static_cast<double>(state_work()) / (state_work() + query_work());
    return pieces_.heads_suffice(units_, threads, twice);
  }

  // KV heads of a task: the largest number that gives every thread the same number of tasks.
  int64_t heads_of_task(int64_t threads) const {
    const int64_t bytes = 2 * state_floats_ * static_cast<int64_t>(sizeof(float));
    const int64_t fitting = std::max<int64_t>(kTaskStateBytes / bytes, 1);
    if (heads_suffice(threads)) {
      const int64_t of_thread = divide_up(units_, threads);
      return divide_up(of_thread, divide_up(of_thread, fitting));
    }
    const int64_t many = units_ * pieces_.count / (kTasksPerThread * threads);
    return std::clamp<int64_t>(many, 1, std::min(units_, fitting));
  }

  float* start(int64_t unit, int64_t piece) const {
    return workspace_.get(starts_) + (unit * pieces_.count + piece) * state_floats_;
  }
  float* log_decay(int64_t unit, int64_t piece) const {
    return workspace_.get(log_decays_) + unit * pieces_.count + piece;
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
    for (int64_t piece = 0; piece < pieces_.count; ++piece) {
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
        if (piece + 1 == pieces_.count) write_state(head.unit, head.sum);
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
    if (piece + 1 < pieces_.count) return;
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
    for (int64_t piece = call_.state ? 0 : 1; piece + 1 < pieces_.count; ++piece) {
      kernels_.add_earlier(start(unit, piece), *log_decay(unit, piece), state_floats_,
                           start(unit, piece + 1));
    }
  }

  // Writes each head's contribution of the piece to its sum; returns the log decay of the piece.
  void run_piece(std::vector<Head>& heads, int64_t piece, int64_t thread, bool attends) const {
    const int64_t first = pieces_.begin(piece), end = pieces_.end(piece);
    for (int64_t row = first; row < end; row += pieces_.chunk) {
      for (size_t i = 0; i < heads.size(); ++i) {
        Head& head = heads[i];
        auto args = chunk_args(head.unit, row, std::min(row + pieces_.chunk, end), thread);
        args.heads = attends ? group_ : 0;
        const bool is_last = i + 1 == heads.size();
        set_next(heads[is_last ? 0 : i + 1].unit, is_last ? row + pieces_.chunk : row, args);
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
    args.next_rows = std::clamp<int64_t>(call_.key.length - row, 0, pieces_.chunk);
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
            .key = {call_.key, b, h, row},
            .value = {call_.value, b, h, row},
            .log_decay = call_.log_decay
                             ? call_.log_decay + b * call_.decay_stride_batch +
                                   h * call_.decay_stride_head + row * call_.decay_stride_row
                             : nullptr,
            .decay_stride = call_.decay_stride_row,
            .heads = group_,
            .query = {call_.query, b, h * group_, row},
            .out = {call_.out, b, h * group_, row},
            .streams_out = streams_out_,
            .scratch = workspace_.get(scratch_) + thread * scratch_floats_};
  }

  const LinearKernels& kernels_ = *cpu_kernels().linear;
  const LinearAttentionParams& call_;
  int64_t units_;
  int64_t group_;  // query heads of a KV head
  int64_t state_floats_;
  bool streams_out_;
  LinearPieces pieces_;
  int64_t heads_ = 1;  // of a task; the last one may have fewer
  int64_t scratch_floats_ = 0;
  Workspace workspace_;
  Workspace::Part<float> scratch_;     // [threads, scratch_floats_]
  Workspace::Part<float> sums_;        // [threads, heads_, state_floats_]
  Workspace::Part<float> starts_;      // [threads, heads_, ...] or [units, pieces, ...]
  Workspace::Part<float> log_decays_;  // [units, pieces]
};

// reverse: from the last token to the first.
LinearAttentionResult attend_causally(const LinearAttentionRequest& r, bool reverse = false) {
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto data = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<float>() : nullptr;
  };
  const auto q = with_contiguous_rows(r.query), k = with_contiguous_rows(r.key);
  const auto v = with_contiguous_rows(r.value);
  const auto decay = r.decay_by_token();
  const auto state = contiguous(r.state), normalizer = contiguous(r.normalizer);
  const auto options = k.options().dtype(at::kFloat);
  auto out = empty_heads(q.size(0), q.size(1), r.length(), v.size(3), q);
  auto last_state = at::empty({k.size(0), k.size(1), k.size(3), v.size(3)}, options);
  auto last_normalizer = at::empty({k.size(0), k.size(1), r.normalize ? k.size(3) : 0}, options);
  if (k.size(0) == 0 || k.size(2) == 0) {
    // Without tokens the states stay as they are.
    state.defined() ? last_state.copy_(state) : last_state.zero_();
    normalizer.defined() ? last_normalizer.copy_(normalizer) : last_normalizer.zero_();
    return {out, last_state, last_normalizer};
  }
  const LinearAttentionParams params{
      .query = heads_view(q),
      .key = heads_view(k),
      .value = heads_view(v),
      .out = heads_view(out),
      .log_decay = data(decay),
      .decay_stride_batch = decay.defined() ? decay.stride(0) : 0,
      .decay_stride_head = decay.defined() ? decay.stride(1) : 0,
      .decay_stride_row = decay.defined() ? decay.stride(2) : 0,
      .state = data(state),
      .normalizer = data(normalizer),
      .last_state = last_state.mutable_data_ptr<float>(),
      .last_normalizer = r.normalize ? last_normalizer.mutable_data_ptr<float>() : nullptr,
      .feature_map = r.feature_map,
      .normalize = r.normalize,
      .scale = static_cast<float>(r.scale)};
  LinearAttention(reverse ? reversed(params) : params).run();
  return {out, last_state, last_normalizer};
}

composite::Scanned scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& log_decay, const at::Tensor& state,
                        int64_t /*chunk_size*/, bool reverse) {
  const LinearAttentionRequest recurrence{q, k, v, log_decay, state};
  const auto [out, last_state, normalizer] = attend_causally(recurrence, reverse);
  return {out, last_state};
}

composite::LinearScan scan_of(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? &composite::linear_scan : &scan;
}

LinearAttentionResult attend(const LinearAttentionRequest& r) {
  if (!r.causal || r.query.scalar_type() == at::kDouble) {
    return composite::linear_attention(r, scan_of(r.query));
  }
  return attend_causally(r);
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
