#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/dense_attention.h"
#include "kernels/cpu/tasks.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill {
namespace {

// Rows of a step and keys of a set, chosen so that the logits of a row block stay in L2.
constexpr int64_t kStep = 1024;

// Whether these kernels are faster than PyTorch's attention, which packs no keys for few rows but
// copies grouped KV heads, and which has no fast path for float16 or a few rows of bfloat16.
bool is_faster(const AttentionArguments& x) {
  const at::Tensor &q = x.query, &k = x.key;
  constexpr int64_t kFewestRows = 64;
  return q.scalar_type() != at::kFloat || q.size(1) > k.size(1) || q.size(2) >= kFewestRows;
}

// The key ranges of a step's rows, as far as a row's window reaches: their own first, then the
// earlier ones, nearest first.
std::vector<KeySource> key_ranges(const RowRange& rows, int64_t window) {
  const int64_t first = std::max<int64_t>(0, rows.position() - window + 1);
  CausalRange range{.begin = rows.position(), .count = rows.count, .window = window};
  std::vector<KeySource> ranges{range};
  while (range.begin > first) {
    range.count = std::min(range.begin - first, kStep);
    range.begin -= range.count;
    ranges.emplace_back(range);
  }
  return ranges;
}

// Attends with the rows of x's query, which are some of a call's, and returns their lse. Two ranges
// of keys at a time; partial results are merged in float32.
at::Tensor attend_rows_of_step(AttendChunk& attend, const AttentionArguments& x,
                               const at::Tensor& out, const RowRange& rows, int64_t window) {
  const auto lse = x.empty_lse();
  AttentionCall call(x, out, lse.mutable_data_ptr<float>());
  const auto ranges = key_ranges(rows, window);
  at::Tensor partial;
  for (size_t i = 0; i < ranges.size(); i += 2) {
    const bool is_last = i + 2 >= ranges.size();
    if (!is_last && !partial.defined()) {
      partial = empty_heads(out.size(0), out.size(1), rows.count, out.size(3), lse);
    }
    call.out = heads_view(is_last ? out : partial);
    attend.run(call, rows, c10::ArrayRef(ranges).slice(i, is_last ? ranges.size() - i : 2));
    if (partial.defined()) call.earlier = heads_view(partial);
    call.sinks = nullptr;  // a sink counts once
  }
  return lse;
}

// Keys of a task of attend_token(), and rows of a KV head's queries for which packing keys costs
// more.
constexpr int64_t kTokenKeys = 512;
constexpr int64_t kTokenRows = 16;

// A few rows of each head: keys are not packed, as each is read once. Returns the outputs in
// float32, [B, Hq, T, Dv].
at::Tensor attend_token(const AttentionArguments& x, int64_t window, const at::Tensor& lse) {
  const HeadsView query = heads_view(x.query), key = heads_view(x.key), value = heads_view(x.value);
  const int64_t units = key.batch * key.heads, group = query.heads / key.heads;
  const int64_t length = x.length(), rows = group * length;
  const int64_t begin_of_first = x.past() - window + 1;  // its window's
  const int64_t first = std::max<int64_t>(0, begin_of_first), count = key.length - first;
  const int64_t parts = divide_up(count, kTokenKeys);
  const int64_t width = rows * (value.dim + 2);  // m, l and numerators of a part
  const int64_t scratch = AttendTokenArgs::scratch_floats(rows, key.dim, value.dim, kTokenKeys);
  const bool serial = units * count * rows * (key.dim + value.dim) < kSerialWork;
  const int64_t threads = serial ? 1 : at::get_num_threads();
  const auto floats = x.query.options().dtype(at::kFloat);
  const auto partial = at::empty({units * parts * width + threads * scratch}, floats);
  const auto out = empty_heads(key.batch, query.heads, length, value.dim, partial);
  float* const results = partial.mutable_data_ptr<float>();
  for_each_task(TaskRange{units * parts}, threads, [&](int64_t task, int64_t thread) {
    const int64_t unit = task / parts, begin = first + task % parts * kTokenKeys;
    const int64_t b = unit / key.heads, h = unit % key.heads;
    float* const result = results + task * width;
    cpu_kernels().attend_token({.query = query.row(b, h * group, 0),
                                .keys = key.row(b, h, begin),
                                .values = value.row(b, h, begin),
                                .dtype = query.dtype,
                                .head_stride = query.stride_head,
                                .row_stride = query.stride_row,
                                .key_stride = key.stride_row,
                                .value_stride = value.stride_row,
                                .heads = group,
                                .rows = length,
                                .count = std::min(kTokenKeys, key.length - begin),
                                .begin = begin_of_first - begin,
                                .limit = x.past() + 1 - begin,
                                .head_dim = key.dim,
                                .value_dim = value.dim,
                                .scale = static_cast<float>(x.scale()),
                                .softcap = static_cast<float>(bounded_softcap(x.softcap)),
                                .m = result,
                                .l = result + rows,
                                .out = result + 2 * rows,
                                .scratch = results + units * parts * width + thread * scratch});
  });
  float* const total = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < units * rows; ++i) {
    const float* part = results + i / rows * parts * width;
    const int64_t r = i % rows, head = i / length % query.heads;
    float m = kNegInf, l = 0.0F;
    const int64_t token = i / length / query.heads * length + i % length;
    float* const row = total + (token * query.heads + head) * value.dim;
    std::fill_n(row, value.dim, 0.0F);
    for (int64_t p = 0; p < parts; ++p, part += width) {
      const MergeFactors factors = merge_factors(m, part[r]);
      m = factors.m;
      l = l * factors.a + part[rows + r] * factors.b;
      const float* const numerator = part + 2 * rows + r * value.dim;
      for (int64_t d = 0; d < value.dim; ++d) {
        row[d] = row[d] * factors.a + numerator[d] * factors.b;
      }
    }
    const float sink = x.sinks ? x.sink_data()[head] : kNegInf;
    const FinishedRow finished = finish_row(m, l, sink * kLog2E);
    for (int64_t d = 0; d < value.dim; ++d) row[d] *= finished.weight;
    if (lse.defined()) lse.mutable_data_ptr<float>()[i] = finished.lse;
  }
  return out;
}

// Attends causally, with a window of at least 1 key for each row. lse [B, Hq, T], float32, is
// written if it is defined.
at::Tensor attend_in_window(const AttentionArguments& arguments, int64_t window,
                            const at::Tensor& lse) {
  const AttentionArguments x = arguments.with_rows(&with_contiguous_rows);
  const int64_t length = x.length();
  if (length == 1 || length * x.query.size(1) / x.key.size(1) <= kTokenRows) {
    return attend_token(x, std::min(window, x.total()), lse).to(x.query.scalar_type());
  }
  const int64_t step = std::min(length, kStep);
  const int64_t keys = std::min(x.total(), kStep);
  Workspace workspace;
  auto out = x.empty_out();
  AttendChunk attend(AttentionCall(x, out, /*lse=*/nullptr), {.rows = step, .keys = {keys, keys}},
                     workspace);
  workspace.allocate();
  for (int64_t row = 0; row < length; row += step) {
    const int64_t rows = std::min(step, length - row);
    AttentionArguments of_step = x;
    of_step.query = x.query.narrow(2, row, rows);
    const auto part =
        attend_rows_of_step(attend, of_step, out.narrow(2, row, rows),
                            {.begin = 0, .count = rows, .past = x.past() + row}, window);
    if (lse.defined()) lse.narrow(2, row, rows).copy_(part);
  }
  return out;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> sliding_window_attention_cpu(const AttentionArguments& x,
                                                                int64_t window) {
  if (x.query.scalar_type() == at::kDouble || x.is_empty()) {
    return composite::sliding_window_attention(x, window);
  }
  const auto lse = x.empty_lse();
  return {attend_in_window(x, window, lse), lse};
}

at::Tensor dense_attention_cpu(const AttentionArguments& x) {
  if (x.query.scalar_type() == at::kDouble || x.is_empty() || (x.is_plain() && !is_faster(x))) {
    return composite::dense_attention(x);
  }
  return attend_in_window(x, /*window=*/x.total(), /*lse=*/{});
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("dense_attention", &dense_attention_entry<&dense_attention_cpu>);
  m.impl("sliding_window_attention",
         &sliding_window_attention_entry<&sliding_window_attention_cpu>);
}

}  // namespace h2o_prefill
