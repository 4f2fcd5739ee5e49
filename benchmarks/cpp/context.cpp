// What a call costs in C++ beside its attention: PrefillContext and MemorySetTracker, timed by
// operators.py.
#include <ATen/ATen.h>
#include <h2o_prefill/ops.h>
#include <h2o_prefill/prefill_context.h>

#include <cstdint>

#define H2O_BENCH extern "C" __attribute__((visibility("default")))

namespace {

using h2o_prefill::MemorySetTracker;
using h2o_prefill::PrefillContext;

// q, k, v of one layer as Hugging Face models have them, seen as [1, heads, length, dim].
at::Tensor view(void* data, bool bfloat16, int64_t heads, int64_t length, int64_t dim) {
  return at::from_blob(data, {1, length, heads, dim}, bfloat16 ? at::kBFloat16 : at::kFloat)
      .transpose(1, 2);
}

// The last `rows` tokens of a history, again and again.
struct Call {
  at::Tensor q, k, v;  // q of the call, k and v of the whole history
  PrefillContext context;
  int64_t past = k.size(2) - q.size(2);

  at::Tensor new_k = k.narrow(2, past, q.size(2));
  at::Tensor new_v = v.narrow(2, past, q.size(2));
  at::Tensor held_k = {}, held_v = {};  // the history where the context has it
  at::Tensor attended = {}, dense = {};
};

// The scores of one layer, in a tracker and as a plain tensor.
struct Scores {
  Scores(int64_t kv_heads, int64_t positions, int64_t width)
      : tracker(/*num_layers=*/1, /*local_window=*/width, /*heavy_budget=*/0, /*sink_tokens=*/0),
        sums(at::rand({1, kv_heads, width})),
        plain(at::zeros({1, kv_heads, positions})) {
    tracker.init_chunk_scores(0, /*chunk_begin=*/0, plain);
    index = tracker.build_memory_set(0, positions).to(at::kLong);
  }

  MemorySetTracker tracker;
  at::Tensor sums, plain, index;
};

}  // namespace

// The two calls keep their outputs, so that h2o_same() can say whether they are the same.
H2O_BENCH void h2o_attend(void* given) {
  Call& call = *static_cast<Call*>(given);
  call.context.truncate(call.past);
  call.context.begin(call.q.size(2));
  call.attended = call.context.attend(0, call.q, call.new_k, call.new_v);
}

// Every call of the context is dense. Freed by h2o_delete_call().
H2O_BENCH void* h2o_new_call(bool bfloat16, void* q, void* k, void* v, int64_t query_heads,
                             int64_t kv_heads, int64_t rows, int64_t keys, int64_t dim) {
  auto* const call = new Call{
      .q = view(q, bfloat16, query_heads, rows, dim),
      .k = view(k, bfloat16, kv_heads, keys, dim),
      .v = view(v, bfloat16, kv_heads, keys, dim),
      .context = PrefillContext(/*num_layers=*/1, keys, {.dense_layers = {0}}),
  };
  if (call->past > 0) {
    const auto before = [&](const at::Tensor& x) { return x.narrow(2, 0, call->past); };
    call->context.begin(call->past);
    call->context.attend(0, before(call->k).repeat_interleave(query_heads / kv_heads, 1),
                         before(call->k), before(call->v));
  }
  h2o_attend(call);
  call->held_k = call->context.cache()->key(0);
  call->held_v = call->context.cache()->value(0);
  return call;
}

H2O_BENCH void h2o_delete_call(void* call) { delete static_cast<Call*>(call); }

// Over the keys and values where the context has them: how they lie in memory is no difference
// between the two.
H2O_BENCH void h2o_dense(void* given) {
  Call& call = *static_cast<Call*>(given);
  call.dense = h2o_prefill::dense_attention(call.q, call.held_k, call.held_v);
}

H2O_BENCH bool h2o_same(void* given) {
  const Call& call = *static_cast<Call*>(given);
  return at::equal(call.attended, call.dense);
}

// A memory set of the last `width` of so many positions, and the sums that every update adds.
H2O_BENCH void* h2o_new_scores(int64_t kv_heads, int64_t positions, int64_t width) {
  return new Scores(kv_heads, positions, width);
}

H2O_BENCH void h2o_delete_scores(void* scores) { delete static_cast<Scores*>(scores); }

H2O_BENCH void h2o_accumulate(void* given) {
  Scores& scores = *static_cast<Scores*>(given);
  scores.tracker.accumulate_memory_scores(0, scores.sums);
}

H2O_BENCH void h2o_scatter_add(void* given) {
  Scores& scores = *static_cast<Scores*>(given);
  scores.plain.scatter_add_(2, scores.index, scores.sums);
}

H2O_BENCH bool h2o_same_scores(void* given) {
  const Scores& scores = *static_cast<Scores*>(given);
  return at::equal(scores.tracker.scores(0), scores.plain);
}
