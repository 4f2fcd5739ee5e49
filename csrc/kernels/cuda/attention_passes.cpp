#include "kernels/cuda/attention_passes.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <limits>

#include "kernels/composite/composite.h"
#include "kernels/cuda/gather_pages.h"
#include "kernels/softmax_state.h"

namespace h2o_prefill {
namespace {

constexpr int64_t kAlignment = 16;  // bytes
constexpr int64_t kLargestHeadDim = 256;

bool has_aligned_rows(const at::Tensor& t) {
  if (t.size(-1) > 1 && t.stride(-1) != 1) return false;
  if (t.size(-2) > 1 && t.stride(-2) * t.element_size() > INT32_MAX) return false;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment) return false;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) {
    if (t.size(d) > 1 && t.stride(d) * t.element_size() % kAlignment) return false;
  }
  return true;
}

bool has_kernel(int64_t head_dim) { return head_dim % 8 == 0 && head_dim <= kLargestHeadDim; }

AttendForwardParams with_rows(const AttendForwardParams& call, const RowRange& rows) {
  AttendForwardParams params = call;
  params.rows = rows;
  return params;
}

}  // namespace

bool has_attention_kernel(const AttentionArguments& x) {
  return x.query.scalar_type() != at::kDouble && has_kernel(x.query.size(3)) &&
         has_kernel(x.value.size(3));
}

at::Tensor with_aligned_rows(const at::Tensor& t) {
  return t.numel() == 0 || has_aligned_rows(t) ? t : t.clone(at::MemoryFormat::Contiguous);
}

at::Tensor gather_pages_cuda(const at::Tensor& pages, const at::Tensor& table, int64_t total) {
  const int64_t row_bytes = pages.size(3) * pages.element_size();
  if (!has_aligned_rows(pages) || row_bytes % kAlignment ||
      row_bytes > kGatherThreads * kAlignment) {
    return composite::gather_pages(pages, table, total);
  }
  const c10::cuda::CUDAGuard guard(pages.device());
  const auto numbers = table.to(at::kInt).contiguous();
  auto out = at::empty({1, pages.size(1), total, pages.size(3)}, pages.options());
  const auto units = [&](int64_t elements) { return elements * pages.element_size() / kAlignment; };
  const GatherPagesParams params{
      .pages = pages.const_data_ptr(),
      .strides = {units(pages.stride(0)), units(pages.stride(1)), units(pages.stride(2))},
      .num_pages = pages.size(0),
      .page_size = pages.size(2),
      .table = numbers.const_data_ptr<int32_t>(),
      .out = out.mutable_data_ptr(),
      .heads = pages.size(1),
      .total = total,
      .row_units = units(pages.size(3))};
  C10_CUDA_CHECK(launch_gather_pages(params, c10::cuda::getCurrentCUDAStream()));
  return out;
}

AttendForwardParams attention_call(const AttentionArguments& x, const at::Tensor& out,
                                   const at::Tensor& lse) {
  AttendForwardParams call{};
  call.query = heads_view(x.query);
  call.key = heads_view(x.key);
  call.value = heads_view(x.value);
  call.out = heads_view(out);
  call.lse = lse.defined() ? lse.mutable_data_ptr<float>() : nullptr;
  double scale = x.scale();
  if (const double cap = bounded_softcap(x.softcap); cap > 0) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    call.cap_scale = static_cast<float>(std::clamp(scale / cap, -kLargest, kLargest));
    // The kernels cap nothing where this is 0: so are all logits then.
    scale = call.cap_scale == 0.0F ? 0.0 : cap;
  }
  call.scale_log2 = static_cast<float>(scale * static_cast<double>(kLog2E));
  call.sinks = x.sink_data();
  call.rows = {.begin = 0, .count = x.length(), .past = x.past()};
  return call;
}

AttendForwardParams chunk_pass(const AttendForwardParams& call, int64_t chunk_size) {
  AttendForwardParams params = call;
  params.causal = {.begin = call.rows.position(),
                   .count = call.rows.count,
                   .chunk_size = std::min(chunk_size, call.rows.count)};
  return params;
}

AttendForwardParams memory_pass(const AttendForwardParams& call, const RowRange& rows,
                                const MemorySetView& sets) {
  AttendForwardParams params = with_rows(call, rows);
  params.gathered = true;
  params.memory = sets;
  return params;
}

AttendForwardParams dense_pass(const AttendForwardParams& call, const RowRange& rows,
                               int64_t window) {
  AttendForwardParams params = with_rows(call, rows);
  params.causal = {.begin = 0, .count = rows.position() + rows.count, .window = window};
  return params;
}

ColumnSumsParams column_sums_pass(const AttendForwardParams& pass, const float* lse, float* sums,
                                  int64_t stride) {
  ColumnSumsParams params{};
  params.query = pass.query;
  params.key = pass.key;
  params.lse = lse;
  params.scale_log2 = pass.scale_log2;
  params.cap_scale = pass.cap_scale;
  params.rows = pass.rows;
  params.gathered = pass.gathered;
  params.causal = pass.causal;
  params.memory = pass.memory;
  params.sums = sums;
  params.sums_stride = stride;
  return params;
}

AttentionStream::AttentionStream(const at::Tensor& like)
    : kernels_(cuda_kernels()),
      stream_(c10::cuda::getCurrentCUDAStream()),
      float_options_(like.options().dtype(at::kFloat)) {}

void AttentionStream::attend(const AttendForwardParams& pass) const {
  C10_CUDA_CHECK(kernels_.attend_forward(pass, stream_));
}

column_sums::Grid AttentionStream::sum_columns(const ColumnSumsParams& pass) {
  column_sums::Grid grid = kernels_.divide_column_sums(pass);
  // The workspace depends on the shape of the pass alone, and so does the order of its additions.
  if (const int64_t floats = grid.partial_floats(); floats > 0) {
    if (!workspace_.defined() || workspace_.numel() < floats) {
      workspace_ = at::empty({floats}, float_options_);
    }
    grid.params.partial = workspace_.mutable_data_ptr<float>();
  }
  C10_CUDA_CHECK(kernels_.column_sums(grid.params, stream_));
  return grid;
}

int64_t parts_of_keys(const AttentionArguments& x, int64_t least_keys) {
  if (x.query.size(0) > 1) return 1;
  const int64_t blocks = x.query.size(1) * divide_up(x.length(), kLimitRows);
  return std::max<int64_t>(std::min(kManyBlocks / blocks, x.total() / least_keys), 1);
}

at::Tensor attend_in_parts(const AttentionArguments& x, const at::Tensor& limits, int64_t parts) {
  const at::Tensor& q = x.query;
  const int64_t rows = x.length();
  const auto limited = [&](const at::Tensor& out, const at::Tensor& lse, const at::Tensor& ends) {
    AttendForwardParams pass = attention_call(x, out, lse);
    pass.rows.past = 0;
    pass.limits = ends.const_data_ptr<int32_t>();
    return pass;
  };
  const AttentionStream stream(q);
  auto out = x.empty_out();
  if (parts == 1) {
    stream.attend(limited(out, /*lse=*/{}, limits));
    return out;
  }
  const auto of_parts = empty_heads(parts, q.size(1), rows, x.value.size(3), q);
  auto lse = at::empty({parts, q.size(1), rows}, q.options().dtype(at::kFloat));
  const int64_t keys = divide_up(x.total(), parts);
  const auto begins = at::arange(0, parts * keys, keys, limits.options()).unsqueeze(-1);
  const auto ends = limits.sub(begins).clamp_(0, keys);
  AttendForwardParams pass = limited(of_parts, lse, ends);
  pass.limits_stride = static_cast<int>(ends.stride(0));
  pass.query.batch = parts;
  pass.query.stride_batch = 0;
  for (HeadsView* const history : {&pass.key, &pass.value}) {
    history->batch = parts;
    history->length = keys;
    history->stride_batch = keys * history->stride_row;
  }
  // A sink counts once for all parts: as one more, without a value.
  pass.sinks = nullptr;
  stream.attend(pass);
  if (x.sinks) lse = at::cat({lse, x.sinks->view({1, -1, 1}).expand({1, -1, rows})});
  const auto weights = at::softmax(lse, 0).narrow(0, 0, parts).unsqueeze(-1);
  return out.copy_(of_parts.mul(weights).sum(0, /*keepdim=*/true));
}

}  // namespace h2o_prefill
