#include "kernels/cpu/error_rows.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/tasks.h"

namespace h2o_prefill {
namespace {

// Keys that are packed at once: they stay in L2.
constexpr int64_t kBlockKeys = 512;

// Shares of the keys of a unit. Their number is the same for any number of threads, and so are the
// results.
constexpr int64_t kMostShares = 8;

float load(const void* row, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<float>(static_cast<const c10::BFloat16*>(row)[i]);
    case DType::kFloat16:
      return static_cast<float>(static_cast<const c10::Half*>(row)[i]);
    default:
      return static_cast<const float*>(row)[i];
  }
}

// Merges a partial result into another one.
void merge_into(float* out, float& lse, const float* part, float part_lse, int64_t dim) {
  const MergeWeights weights = merge_weights(lse, part_lse);
  for (int64_t d = 0; d < dim; ++d) out[d] = out[d] * weights.a + part[d] * weights.b;
  lse = weights.lse;
}

}  // namespace

ErrorRows::ErrorRows(const PrefillRequest& request, Workspace& workspace)
    : request_(request),
      workspace_(workspace),
      group_(request.query.size(1) / request.key.size(1)),
      shares_(std::min(divide_up(request.total(), kBlockKeys), kMostShares)),
      threads_(at::get_num_threads()) {
  const MeasuredRows measured = request.measured_rows();
  for (int64_t i = 0; i < measured.size(); ++i) rows_.push_back(measured.row(i));
  const CpuKernels& kernels = cpu_kernels();
  const int64_t keys = std::min(request.total(), kBlockKeys);
  const int64_t dim = request.key.size(3);
  const int64_t value_dim = request.value.size(3);
  // Rows of float32 hold words of any dtype.
  key_floats_ =
      Workspace::whole_lines<float>(kernels.packed_key_floats(keys, dim, DType::kFloat32));
  value_floats_ =
      Workspace::whole_lines<float>(kernels.packed_value_floats(keys, value_dim, DType::kFloat32));
  thread_floats_ = key_floats_ + value_floats_ +
                   Workspace::whole_lines<float>(kernels.scratch_floats(dim, value_dim, keys));
  const int64_t units = request.units();
  thread_parts_ = workspace.add<float>(threads_ * thread_floats_);
  thread_outs_ = workspace.add<float>(threads_ * all_rows() * value_dim);
  thread_lses_ = workspace.add<float>(threads_ * all_rows());
  limits_ = workspace.add<int32_t>(threads_ * all_rows());
  queries_ = workspace.add<float>(units * all_rows() * dim);
  outs_ = workspace.add<float>(units * shares_ * all_rows() * value_dim);
  lses_ = workspace.add<float>(units * shares_ * all_rows());
}

void ErrorRows::attend(const AttentionCall& call) const {
  const int64_t bytes = call.key.dim * size_of(call.query.dtype);
  for (int64_t unit = 0; unit < request_.units(); ++unit) {
    auto* to = reinterpret_cast<char*>(workspace_.get(queries_) + unit * all_rows() * call.key.dim);
    for (int64_t i = 0; i < all_rows(); ++i, to += bytes) {
      const int64_t head = unit % call.key.heads * group_ + i % group_;
      std::memcpy(to, call.query.row(unit / call.key.heads, head, rows_[i / group_]), bytes);
    }
  }
  const int64_t blocks = divide_up(request_.total(), kBlockKeys);
  for_each_task(TaskRange{request_.units() * shares_}, threads_, [&](int64_t task, int64_t thread) {
    const int64_t index = task % shares_;
    attend_share(call,
                 {.unit = task / shares_,
                  .index = index,
                  .begin = blocks * index / shares_ * kBlockKeys,
                  .end = std::min(blocks * (index + 1) / shares_ * kBlockKeys, request_.total())},
                 thread);
  });
}

void ErrorRows::attend_share(const AttentionCall& call, const Share& share, int64_t thread) const {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t b = share.unit / call.key.heads;
  const int64_t h = share.unit % call.key.heads;
  const int64_t dim = call.value.dim;
  float* const outs = workspace_.get(outs_) + result(share.unit, share.index) * dim;
  float* const lses = workspace_.get(lses_) + result(share.unit, share.index);
  std::fill_n(outs, all_rows() * dim, 0.0F);
  std::fill_n(lses, all_rows(), kNegInf);
  float* const keys = workspace_.get(thread_parts_) + thread * thread_floats_;
  float* const values = keys + key_floats_;
  float* const block_outs = workspace_.get(thread_outs_) + thread * all_rows() * dim;
  float* const block_lses = workspace_.get(thread_lses_) + thread * all_rows();
  int32_t* const limits = workspace_.get(limits_) + thread * all_rows();
  for (int64_t begin = share.begin; begin < share.end; begin += kBlockKeys) {
    // Rows before the block see none of its keys.
    const int64_t first =
        (std::lower_bound(rows_.begin(), rows_.end(), begin - request_.past()) - rows_.begin()) *
        group_;
    if (first == all_rows()) break;
    const int64_t count = std::min(kBlockKeys, share.end - begin);
    const auto pack = [&](const HeadsView& from, float* packed) {
      return pack_whole(from.row(b, h, begin), from.dtype, from.stride_row, nullptr, count,
                        from.dim, packed);
    };
    kernels.pack_keys(pack(call.key, keys));
    kernels.pack_values(pack(call.value, values));
    for (int64_t i = first; i < all_rows(); ++i) {
      const int64_t visible = request_.past() + rows_[i / group_] + 1 - begin;
      limits[i] = static_cast<int32_t>(std::min(visible, count));
    }
    const KeySet set{.keys = keys, .values = values, .count = count, .limits = limits + first};
    const float* const query = workspace_.get(queries_) + share.unit * all_rows() * call.key.dim;
    kernels.attend_rows({.query = reinterpret_cast<const char*>(query) +
                                  first * call.key.dim * size_of(call.query.dtype),
                         .out = block_outs + first * dim,
                         .lse = block_lses + first,
                         .dtype = call.query.dtype,
                         .out_dtype = DType::kFloat32,
                         .query_stride = call.key.dim,
                         .out_stride = dim,
                         .rows = all_rows() - first,
                         .head_dim = call.key.dim,
                         .value_dim = dim,
                         .scale = call.scale,
                         .softcap = call.softcap,
                         .sets = &set,
                         .num_sets = 1,
                         .gemm = kernels.gemm,
                         .scratch = values + value_floats_});
    for (int64_t i = first; i < all_rows(); ++i) {
      merge_into(outs + i * dim, lses[i], block_outs + i * dim, block_lses[i], dim);
    }
  }
  if (kernels.gemm_release) kernels.gemm_release();
}

double ErrorRows::error(const AttentionCall& call, int64_t unit, int64_t first, int64_t end) const {
  const int64_t b = unit / call.key.heads;
  const int64_t h = unit % call.key.heads;
  const int64_t dim = call.value.dim;
  std::vector<float> exact(dim);
  double sum = 0.0;
  for (int64_t i = first * group_; i < end * group_; ++i) {
    const int64_t head = h * group_ + i % group_;
    // A sink is one more key, without a value.
    float lse = call.sinks ? call.sinks[head] : kNegInf;
    std::fill(exact.begin(), exact.end(), 0.0F);
    for (int64_t share = 0; share < shares_; ++share) {
      const int64_t row = result(unit, share) + i;
      merge_into(exact.data(), lse, workspace_.get(outs_) + row * dim, workspace_.get(lses_)[row],
                 dim);
    }
    const void* const sparse = call.out.row(b, head, rows_[i / group_]);
    double missed = 0.0;
    double whole = 0.0;
    for (int64_t d = 0; d < dim; ++d) {
      const double difference = load(sparse, call.out.dtype, d) - exact[d];
      missed += difference * difference;
      whole += static_cast<double>(exact[d]) * exact[d];
    }
    if (whole > 0.0) sum += missed / whole;
  }
  return sum / static_cast<double>((end - first) * group_);
}

void ErrorRows::measure(const AttentionCall& call, const RowRange& rows) const {
  const auto measured = [&](int64_t row) {
    return std::lower_bound(rows_.begin(), rows_.end(), row) - rows_.begin();
  };
  const int64_t first = measured(rows.begin);
  const int64_t end = measured(rows.begin + rows.count);
  float* const errors = request_.errors.mutable_data_ptr<float>();
  for_each_task(TaskRange{request_.units()}, threads_, [&](int64_t unit, int64_t) {
    request_.widening().record(errors + unit * kErrorFields, error(call, unit, first, end));
  });
}

}  // namespace h2o_prefill
