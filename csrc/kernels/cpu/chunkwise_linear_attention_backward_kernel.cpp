#include <ATen/ATen.h>

#include <utility>

#include "common/tensors.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/linear_backward.h"
#include "kernels/cpu/linear_chunk_backward.h"
#include "kernels/cpu/linear_pieces.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {
namespace {

// States are float32 and contiguous. Null input: zero; null output: not computed.
struct LinearBackwardCall {
  HeadsView query;
  HeadsView key;
  HeadsView value;
  HeadsView grad_out;
  HeadsView grad_query;
  HeadsView grad_key;
  HeadsView grad_value;
  const float* log_decay;  // null: none
  int64_t decay_strides[3];
  float* grad_log_decay;  // [B, Hkv, T]
  const float* state;     // before the first token
  const float* normalizer;
  float* grad_state;
  float* grad_normalizer;
  const float* grad_last_state;  // gradient of the state after the last token
  const float* grad_last_normalizer;
  FeatureMap feature_map;
  bool normalize;
  float scale;
};

class LinearBackward {
 public:
  explicit LinearBackward(const LinearBackwardCall& call)
      : call_(call),
        units_(call.key.batch * call.key.heads),
        group_(call.query.heads / call.key.heads),
        state_floats_(kernels_.state_floats(call.key.dim, call.value.dim)),
        past_caches_(exceeds_caches(call.grad_query)),
        pieces_(units_, call.key.length, state_floats_) {}

  void run() {
    const int64_t threads = work() < kSerialWork ? 1 : at::get_num_threads();
    scratch_floats_ = Workspace::whole_lines<float>(
        kernels_.scratch_floats(call_.key.dim, call_.value.dim, pieces_.chunk));
    scratch_ = workspace_.add<float>(threads * scratch_floats_);
    sums_ = workspace_.add<float>(threads * state_floats_);
    const int64_t weights = call_.normalize ? units_ * group_ * call_.key.length : 0;
    inverses_ = workspace_.add<float>(weights);
    grad_weights_ = workspace_.add<float>(weights);
    const bool whole = heads_suffice(threads);
    const int64_t states = whole ? threads : units_ * pieces_.count;
    starts_ = workspace_.add<float>(states * state_floats_);
    adjoints_ = workspace_.add<float>(states * state_floats_);
    log_decays_ = workspace_.add<float>(units_ * pieces_.count);
    lasts_ = workspace_.add<float>(units_);
    workspace_.allocate();
    if (whole) {
      for_each_task(TaskRange{units_}, threads,
                    [&](int64_t unit, int64_t thread) { run_unit(unit, thread); });
    } else {
      run_pieces(threads);
    }
    if (!call_.grad_log_decay) return;
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { sum_flow(unit); });
  }

 private:
  using Walk = float (*)(const LinearBackwardArgs&);

  // One chunk of a walk through a piece.
  struct Step {
    int64_t row;
    int64_t rows = 0;
    int64_t next = 0;
    int64_t next_rows = 0;
    const float* start;
    float log_decay = 0.0F;  // of the chunks walked so far
    float* sum;
    bool sum_is_zero = true;

    void take(float chunk_log_decay) {
      log_decay += chunk_log_decay;
      row += next;
      sum_is_zero = false;
    }
  };

  // Multiply-adds per token: for the initial states of pieces, and for everything else.
  int64_t state_work() const { return (1 + group_) * call_.key.dim * call_.value.dim; }
  int64_t other_work() const {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim;
    return (3 + 2 * group_) * dim * value_dim + 3 * group_ * pieces_.chunk * (dim + value_dim) / 2;
  }
  int64_t work() const { return units_ * call_.key.length * other_work(); }

  // Whether tasks of whole heads take less time than tasks of pieces, which compute states twice.
  bool heads_suffice(int64_t threads) const {
    if (threads == 1 || pieces_.count == 1) return true;
    const double whole = static_cast<double>(divide_up(units_, threads));
    const double twice = static_cast<double>(state_work()) / other_work();
    return whole * threads <= units_ * (1 + twice);
  }

  float* start(int64_t unit, int64_t piece) const {
    return workspace_.get(starts_) + (unit * pieces_.count + piece) * state_floats_;
  }
  // The adjoint after the piece.
  float* adjoint(int64_t unit, int64_t piece) const {
    return workspace_.get(adjoints_) + (unit * pieces_.count + piece) * state_floats_;
  }
  float* log_decay(int64_t unit, int64_t piece) const {
    return workspace_.get(log_decays_) + unit * pieces_.count + piece;
  }
  float* thread_sum(int64_t thread) const { return workspace_.get(sums_) + thread * state_floats_; }

  bool has_last() const { return call_.grad_last_state || call_.grad_last_normalizer; }

  // One of the states [B, Hkv, D, Dv] and [B, Hkv, D].
  void read(const float* state, const float* normalizer, int64_t unit, float* packed) const {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim;
    kernels_.pack_state(state ? state + unit * dim * value_dim : nullptr,
                        normalizer ? normalizer + unit * dim : nullptr, dim, value_dim, packed);
  }
  void read_state(int64_t unit, float* packed) const {
    read(call_.state, call_.normalizer, unit, packed);
  }
  void read_adjoint(int64_t unit, float* packed) const {
    read(call_.grad_last_state, call_.grad_last_normalizer, unit, packed);
  }
  void write_gradient(int64_t unit, const float* packed) const {
    const int64_t dim = call_.key.dim, value_dim = call_.value.dim;
    kernels_.unpack_state(packed, dim, value_dim,
                          call_.grad_state ? call_.grad_state + unit * dim * value_dim : nullptr,
                          call_.grad_normalizer ? call_.grad_normalizer + unit * dim : nullptr);
  }

  // The decays also scale the last state: adds its share of their gradients.
  void set_last(int64_t unit, const float* state, const float* adjoint) const {
    workspace_.get(lasts_)[unit] =
        adjoint ? kernels_.dot_states(state, adjoint, state_floats_) : 0.0F;
  }

  // Walks all pieces of a KV head in sequence, forward and then backward.
  void run_unit(int64_t unit, int64_t thread) const {
    float* before = workspace_.get(starts_) + thread * state_floats_;
    float* sum = thread_sum(thread);
    bool has_state = call_.state != nullptr;
    if (has_state) read_state(unit, before);
    for (int64_t piece = 0; piece < pieces_.count; ++piece) {
      *log_decay(unit, piece) = run_forward(kernels_.walk_forward, unit, piece,
                                            has_state ? before : nullptr, sum, thread);
      if (has_state) add_rest(before, unit, piece, sum);
      std::swap(before, sum);
      has_state = true;
    }
    float* after = workspace_.get(adjoints_) + thread * state_floats_;
    bool has_adjoint = has_last();
    if (has_adjoint) read_adjoint(unit, after);
    set_last(unit, before, has_adjoint ? after : nullptr);
    for (int64_t piece = pieces_.count; piece-- > 0;) {
      run_backward(kernels_.walk_backward, unit, piece, has_adjoint ? after : nullptr, sum, thread);
      if (has_adjoint) add_rest(after, unit, piece, sum);
      std::swap(after, sum);
      has_adjoint = true;
    }
    write_gradient(unit, after);
  }

  // Walks pieces independently, from initial states that are computed first.
  void run_pieces(int64_t threads) const {
    const int64_t count = pieces_.count;
    for_each_task(TaskRange{units_ * (count - 1)}, threads, [&](int64_t task, int64_t thread) {
      const int64_t unit = task / (count - 1), piece = task % (count - 1);
      *log_decay(unit, piece) =
          run_forward(kernels_.add_state, unit, piece, nullptr, start(unit, piece + 1), thread);
    });
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { join_states(unit); });
    for_each_task(TaskRange{units_ * count}, threads, [&](int64_t task, int64_t thread) {
      const int64_t unit = task / count, piece = task % count;
      const float* const before = piece > 0 || call_.state ? start(unit, piece) : nullptr;
      float* const sum = thread_sum(thread);
      *log_decay(unit, piece) =
          run_forward(kernels_.walk_forward, unit, piece, before, sum, thread);
      if (piece + 1 == count) {
        if (before) add_rest(before, unit, piece, sum);
        if (has_last()) read_adjoint(unit, adjoint(unit, piece));
        set_last(unit, sum, has_last() ? adjoint(unit, piece) : nullptr);
      }
      if (piece > 0) {
        run_backward(kernels_.add_adjoint, unit, piece, nullptr, adjoint(unit, piece - 1), thread);
      }
    });
    for_each_task(TaskRange{units_}, threads, [&](int64_t unit, int64_t) { join_adjoints(unit); });
    for_each_task(TaskRange{units_ * count}, threads, [&](int64_t task, int64_t thread) {
      const int64_t unit = task / count, piece = task % count;
      const float* const after = piece + 1 < count || has_last() ? adjoint(unit, piece) : nullptr;
      float* const sum = thread_sum(thread);
      run_backward(kernels_.walk_backward, unit, piece, after, sum, thread);
      if (piece > 0) return;
      if (after) add_rest(after, unit, piece, sum);
      write_gradient(unit, sum);
    });
  }

  // Turns each piece's contribution into the state before that piece.
  void join_states(int64_t unit) const {
    if (call_.state) read_state(unit, start(unit, 0));
    for (int64_t piece = call_.state ? 0 : 1; piece + 1 < pieces_.count; ++piece) {
      add_rest(start(unit, piece), unit, piece, start(unit, piece + 1));
    }
  }

  void join_adjoints(int64_t unit) const {
    for (int64_t piece = pieces_.count - (has_last() ? 1 : 2); piece > 0; --piece) {
      add_rest(adjoint(unit, piece), unit, piece, adjoint(unit, piece - 1));
    }
  }

  // sum += `state`, decayed over the piece.
  void add_rest(const float* state, int64_t unit, int64_t piece, float* sum) const {
    cpu_kernels().linear->add_earlier(state, *log_decay(unit, piece), state_floats_, sum);
  }

  // Write the piece's contribution to `sum` and return its log decay.
  float run_forward(Walk walk, int64_t unit, int64_t piece, const float* before, float* sum,
                    int64_t thread) const {
    const int64_t end = pieces_.end(piece);
    Step step{.row = pieces_.begin(piece), .start = before, .sum = sum};
    while (step.row < end) {
      step.rows = std::min(pieces_.chunk, end - step.row);
      step.next = step.rows;
      step.next_rows = std::min(pieces_.chunk, end - step.row - step.rows);
      step.take(walk(arguments(unit, step, thread)));
    }
    return step.log_decay;
  }
  float run_backward(Walk walk, int64_t unit, int64_t piece, const float* after, float* sum,
                     int64_t thread) const {
    const int64_t first = pieces_.begin(piece), end = pieces_.end(piece);
    Step step{.row = first + (end - first - 1) / pieces_.chunk * pieces_.chunk,
              .next = -pieces_.chunk,
              .start = after,
              .sum = sum};
    while (step.row >= first) {
      step.rows = std::min(pieces_.chunk, end - step.row);
      step.next_rows = step.row > first ? pieces_.chunk : 0;
      step.take(walk(arguments(unit, step, thread)));
    }
    return step.log_decay;
  }

  LinearBackwardArgs arguments(int64_t unit, const Step& step, int64_t thread) const {
    const int64_t b = unit / call_.key.heads, h = unit % call_.key.heads;
    const auto rows_of = [&](const HeadsView& view, int64_t head) {
      return LinearRows{view.row(b, head, step.row), view.stride_row, view.stride_head};
    };
    const int64_t weights = unit * group_ * call_.key.length + step.row;
    return {.dtype = call_.key.dtype,
            .feature_map = call_.feature_map,
            .normalize = call_.normalize,
            .scale = call_.scale,
            .rows = step.rows,
            .next = step.next,
            .next_rows = step.next_rows,
            .key_dim = call_.key.dim,
            .value_dim = call_.value.dim,
            .key = rows_of(call_.key, h),
            .value = rows_of(call_.value, h),
            .log_decay = call_.log_decay
                             ? call_.log_decay + b * call_.decay_strides[0] +
                                   h * call_.decay_strides[1] + step.row * call_.decay_strides[2]
                             : nullptr,
            .decay_stride = call_.decay_strides[2],
            .past_caches = past_caches_,
            .heads = group_,
            .query = rows_of(call_.query, h * group_),
            .grad_out = rows_of(call_.grad_out, h * group_),
            .grad_query = rows_of(call_.grad_query, h * group_),
            .grad_key = rows_of(call_.grad_key, h),
            .grad_value = rows_of(call_.grad_value, h),
            .inverse = workspace_.get(inverses_) + weights,
            .grad_weight = workspace_.get(grad_weights_) + weights,
            .weight_head_stride = call_.key.length,
            .flow = call_.grad_log_decay ? call_.grad_log_decay + unit * call_.key.length + step.row
                                         : nullptr,
            .start = step.start,
            .start_log_decay = step.log_decay,
            .sum = step.sum,
            .sum_is_zero = step.sum_is_zero,
            .scratch = workspace_.get(scratch_) + thread * scratch_floats_};
  }

  // A decay scales every contribution of earlier tokens to later results. Its gradient is the sum,
  // from its token on, of query . grad_query - key . grad_key, plus the share of the last state.
  void sum_flow(int64_t unit) const {
    float* const flow = call_.grad_log_decay + unit * call_.key.length;
    double sum = workspace_.get(lasts_)[unit];
    for (int64_t t = call_.key.length; t-- > 0;) {
      sum += flow[t];
      flow[t] = static_cast<float>(sum);
    }
  }

  const LinearBackwardKernels& kernels_ = *cpu_kernels().linear_backward;
  const LinearBackwardCall& call_;
  int64_t units_;
  int64_t group_;  // query heads of a KV head
  int64_t state_floats_;
  bool past_caches_;
  LinearPieces pieces_;
  int64_t scratch_floats_ = 0;
  Workspace workspace_;
  Workspace::Part<float> scratch_;       // [threads, scratch_floats_]
  Workspace::Part<float> sums_;          // [threads, state_floats_]
  Workspace::Part<float> inverses_;      // [units, group_, length], of normalised outputs
  Workspace::Part<float> grad_weights_;  // [units, group_, length]
  Workspace::Part<float> starts_;        // [threads or units * pieces, state_floats_]
  Workspace::Part<float> adjoints_;      // [threads or units * pieces, state_floats_]
  Workspace::Part<float> log_decays_;    // [units, pieces]
  Workspace::Part<float> lasts_;         // [units]
};

}  // namespace

LinearAttentionInputGradients linear_attention_backward(const LinearAttentionRequest& r,
                                                        const LinearAttentionGradients& gradients) {
  const auto q = with_contiguous_rows(r.query), k = with_contiguous_rows(r.key);
  const auto v = with_contiguous_rows(r.value), grad_out = with_contiguous_rows(gradients.out);
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto state = contiguous(r.state), normalizer = contiguous(r.normalizer);
  const auto last_state = contiguous(gradients.state);
  const auto last_normalizer = r.normalize ? contiguous(gradients.normalizer) : at::Tensor();
  const auto like = [](const at::Tensor& t) {
    const auto result = at::empty(t.sizes(), t.options(), at::MemoryFormat::Contiguous);
    advise_huge_pages(result);
    return result;
  };
  const auto grad_q = like(r.query), grad_k = like(r.key), grad_v = like(r.value);
  const auto floats = r.key.options().dtype(at::kFloat);
  const auto none = at::empty({0}, floats);
  const auto decay = r.decay_by_token();
  const auto grad_decay = decay.defined() ? at::empty(decay.sizes(), floats) : none;
  const auto grad_state = state.defined() ? like(state) : none;
  const auto grad_normalizer = normalizer.defined() ? like(normalizer) : none;
  const auto data = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<float>() : nullptr;
  };
  const auto result = [](const at::Tensor& t) {
    return t.numel() > 0 ? t.mutable_data_ptr<float>() : nullptr;
  };
  LinearBackwardCall call{.query = heads_view(q),
                          .key = heads_view(k),
                          .value = heads_view(v),
                          .grad_out = heads_view(grad_out),
                          .grad_query = heads_view(grad_q),
                          .grad_key = heads_view(grad_k),
                          .grad_value = heads_view(grad_v),
                          .log_decay = data(decay),
                          .decay_strides = {},
                          .grad_log_decay = result(grad_decay),
                          .state = data(state),
                          .normalizer = data(normalizer),
                          .grad_state = result(grad_state),
                          .grad_normalizer = result(grad_normalizer),
                          .grad_last_state = data(last_state),
                          .grad_last_normalizer = data(last_normalizer),
                          .feature_map = r.feature_map,
                          .normalize = r.normalize,
                          .scale = static_cast<float>(r.scale)};
  for (int i = 0; decay.defined() && i < 3; ++i) call.decay_strides[i] = decay.stride(i);
  LinearBackward(call).run();
  const bool by_head = r.log_decay.defined() && r.log_decay.dim() == 1;
  return {grad_q,     grad_k,
          grad_v,     by_head ? grad_decay.sum(at::IntArrayRef{0, 2}) : grad_decay,
          grad_state, grad_normalizer};
}

}  // namespace h2o_prefill
