#include "kernels/cpu/attend_chunk.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "kernels/cpu/attend_rows.h"

namespace h2o_prefill {
namespace {

// Rows of a task: small enough that three KV heads and one chunk keep many cores busy, two row
// blocks at least.
constexpr int64_t kTaskRows = 64;

// Runs task(i, thread) for i in [0, n); threads take the next task as they become free. Each task
// writes only what is its own, so the result does not depend on who runs it.
template <typename Task>
void parallel_tasks(int64_t n, const Task& task) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(n, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t i = next++; i < n; i = next++) task(i, thread);
    }
  });
}

at::Tensor float_workspace(int64_t n) {
  return at::empty({n}, at::TensorOptions().dtype(at::kFloat));
}

}  // namespace

struct AttendChunk::Impl {
  const CpuKernels& kernels = cpu_kernels();
  int64_t group;      // query heads of a KV head
  int64_t task_rows;  // a recall block is a whole number of tasks
  int64_t max_recalled = 0;
  int64_t key_floats[2];  // packed keys of one (batch row, KV head)
  int64_t value_floats[2];
  int64_t partial_stride[2];
  int64_t partials;  // partial column sums of a task: one, or one a query head of the group
  int64_t thread_floats;
  at::Tensor packed_keys[2];
  at::Tensor packed_values[2];
  at::Tensor partial[2];  // [task, partials, partial_stride]
  at::Tensor thread_scratch;
  at::Tensor thread_ints;
  int64_t thread_int_count;

  int64_t key_count(const KeySource& set, int64_t unit) const {
    return set.counts ? set.counts[unit] : set.count;
  }

  void pack(const AttendChunkArgs& args);
  void attend_task(const AttendChunkArgs& args, int64_t task, int64_t tasks_of_unit,
                   int64_t thread);
  KeySet pack_recalled(const AttendChunkArgs& args, int64_t b, int64_t h, int64_t row, int64_t rows,
                       float* packed, int32_t* ints) const;
  void reduce(const AttendChunkArgs& args, int set, int64_t unit, int64_t tasks_of_unit);
};

AttendChunk::AttendChunk(const HeadsView& query, const HeadsView& key, const HeadsView& value,
                         const RecallSource& recall, int64_t max_rows, int64_t max_keys0,
                         int64_t max_keys1)
    : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  const int64_t units = key.batch * key.heads;
  m.group = key.heads ? query.heads / key.heads : 0;
  m.task_rows = recall.offsets ? std::gcd(recall.block, kTaskRows) : kTaskRows;
  const int64_t tasks = units * ((max_rows + m.task_rows - 1) / m.task_rows);
  m.partials = m.group;  // kept apart so that either reduction is exact and in a fixed order
  const int64_t max_keys[2] = {max_keys0, max_keys1};
  for (int s = 0; s < 2; ++s) {
    m.key_floats[s] = m.kernels.packed_key_floats(max_keys[s], key.dim);
    m.value_floats[s] = m.kernels.packed_value_floats(max_keys[s], value.dim);
    m.partial_stride[s] = m.kernels.padded(max_keys[s]);
    m.packed_keys[s] = float_workspace(units * m.key_floats[s]);
    m.packed_values[s] = float_workspace(units * m.value_floats[s]);
    m.partial[s] = float_workspace(tasks * m.partials * m.partial_stride[s]);
  }
  if (recall.offsets) {
    for (int64_t i = 0; i < key.batch * recall.blocks; ++i) {
      m.max_recalled = std::max<int64_t>(m.max_recalled, recall.offsets[i + 1] - recall.offsets[i]);
    }
  }
  m.thread_floats = m.kernels.scratch_floats(key.dim, value.dim,
                                             std::max({max_keys0, max_keys1, m.max_recalled})) +
                    m.kernels.packed_key_floats(m.max_recalled, key.dim) +
                    m.kernels.packed_value_floats(m.max_recalled, value.dim);
  m.thread_int_count = m.max_recalled + 2 * m.task_rows;
  const int64_t threads = at::get_num_threads();
  m.thread_scratch = float_workspace(threads * m.thread_floats);
  m.thread_ints = at::empty({threads * m.thread_int_count}, at::TensorOptions().dtype(at::kInt));
}

AttendChunk::~AttendChunk() = default;

// Packs both sets of every (batch row, KV head): the conversion to float32 happens here, once for
// all heads of a group.
void AttendChunk::Impl::pack(const AttendChunkArgs& args) {
  const int64_t units = args.key.batch * args.key.heads;
  parallel_tasks(units * args.num_sets * 2, [&](int64_t i, int64_t) {
    const bool is_key = i % 2 == 0;
    const int s = static_cast<int>(i / 2 % args.num_sets);
    const int64_t unit = i / 2 / args.num_sets;
    const KeySource& set = args.sets[s];
    const HeadsView& from = is_key ? args.key : args.value;
    PackArgs pack{};
    pack.data = from.row(unit / from.heads, unit % from.heads, set.indices ? 0 : set.begin);
    pack.dtype = from.dtype;
    pack.stride_row = from.stride_row;
    pack.positions = set.indices ? set.indices + unit * set.count : nullptr;
    pack.count = key_count(set, unit);
    pack.dim = from.dim;
    if (is_key) {
      pack.packed = packed_keys[s].mutable_data_ptr<float>() + unit * key_floats[s];
      kernels.pack_keys(pack);
    } else {
      pack.packed = packed_values[s].mutable_data_ptr<float>() + unit * value_floats[s];
      kernels.pack_values(pack);
    }
  });
}

// The keys that rows [row, row + rows) recall: those of their block that lie before this range and
// are not in the head's memory set. Rows see a prefix, since the list rises with visible_from.
KeySet AttendChunk::Impl::pack_recalled(const AttendChunkArgs& args, int64_t b, int64_t h,
                                        int64_t row, int64_t rows, float* packed,
                                        int32_t* ints) const {
  const RecallSource& recall = args.recall;
  const int64_t block = b * recall.blocks + row / recall.block;
  const int64_t unit = b * args.key.heads + h;
  const int32_t* memory =
      args.num_sets > 1 ? args.sets[1].indices + unit * args.sets[1].count : nullptr;
  const int64_t memory_count = args.num_sets > 1 ? key_count(args.sets[1], unit) : 0;
  int32_t* kept = ints;
  int32_t* limits = ints + max_recalled;
  int64_t count = 0;
  int64_t r = 0;
  for (int64_t i = recall.offsets[block]; i < recall.offsets[block + 1]; ++i) {
    const int32_t position = recall.positions[i];
    while (r < rows && args.past + row + r < recall.visible_from[i])
      limits[r++] = static_cast<int32_t>(count);
    if (r == rows) break;
    if (position >= args.past + args.begin) continue;
    if (std::binary_search(memory, memory + memory_count, position)) continue;
    kept[count++] = position;
  }
  while (r < rows) limits[r++] = static_cast<int32_t>(count);

  PackArgs pack{args.key.row(b, h, 0), args.key.dtype, args.key.stride_row, kept, count,
                args.key.dim,          packed};
  kernels.pack_keys(pack);
  KeySet set{packed, packed + kernels.packed_key_floats(count, args.key.dim), count, limits,
             nullptr};
  pack.data = args.value.row(b, h, 0);
  pack.dtype = args.value.dtype;
  pack.stride_row = args.value.stride_row;
  pack.dim = args.value.dim;
  pack.packed = packed + kernels.packed_key_floats(count, args.key.dim);
  kernels.pack_values(pack);
  return set;
}

// One task: task_rows rows of every query head of one KV head.
void AttendChunk::Impl::attend_task(const AttendChunkArgs& args, int64_t task,
                                    int64_t tasks_of_unit, int64_t thread) {
  const int64_t unit = task / tasks_of_unit;
  const int64_t b = unit / args.key.heads;
  const int64_t h = unit % args.key.heads;
  // The last rows of a causal range have the most keys: they go first.
  const int64_t slot = tasks_of_unit - 1 - task % tasks_of_unit;
  const int64_t offset = slot * task_rows;
  const int64_t row = args.begin + offset;
  const int64_t rows = std::min(task_rows, args.rows - offset);

  float* scratch = thread_scratch.mutable_data_ptr<float>() + thread * thread_floats;
  int32_t* ints = thread_ints.mutable_data_ptr<int32_t>() + thread * thread_int_count;
  int32_t* causal_limits = ints + max_recalled + task_rows;
  for (int64_t r = 0; r < rows; ++r) causal_limits[r] = static_cast<int32_t>(offset + r + 1);

  KeySet sets[3];
  int num_sets = 0;
  for (; num_sets < args.num_sets; ++num_sets) {
    const KeySource& set = args.sets[num_sets];
    sets[num_sets] = {
        packed_keys[num_sets].const_data_ptr<float>() + unit * key_floats[num_sets],
        packed_values[num_sets].const_data_ptr<float>() + unit * value_floats[num_sets],
        key_count(set, unit), set.causal ? causal_limits : nullptr, nullptr};
  }
  if (args.recall.offsets) {
    float* packed = scratch;
    scratch += kernels.packed_key_floats(max_recalled, args.key.dim) +
               kernels.packed_value_floats(max_recalled, args.value.dim);
    const KeySet recalled = pack_recalled(args, b, h, row, rows, packed, ints);
    if (recalled.count) sets[num_sets++] = recalled;
  }

  AttendRowsArgs attend{};
  attend.dtype = args.query.dtype;
  attend.query_stride = args.query.stride_row;
  attend.out_stride = args.out.stride_row;
  attend.rows = rows;
  attend.head_dim = args.key.dim;
  attend.value_dim = args.value.dim;
  attend.scale = args.scale;
  attend.sets = sets;
  attend.num_sets = num_sets;
  attend.scratch = scratch;
  for (int64_t g = 0; g < group; ++g) {
    const int64_t head = h * group + g;
    for (int s = 0; s < args.num_sets; ++s) {
      if (!args.sets[s].colsum) continue;
      float* sums = partial[s].mutable_data_ptr<float>() +
                    ((unit * tasks_of_unit + slot) * partials + g) * partial_stride[s];
      std::fill_n(sums, kernels.padded(sets[s].count), 0.0F);
      sets[s].colsum = sums;
    }
    attend.query = args.query.row(b, head, row);
    attend.out = args.out.row(b, head, row);
    attend.lse = args.lse + (b * args.query.heads + head) * args.query.length + row;
    kernels.attend_rows(attend);
  }
}

// Adds up the partial column sums of one (batch row, KV head), always in the same order.
void AttendChunk::Impl::reduce(const AttendChunkArgs& args, int set, int64_t unit,
                               int64_t tasks_of_unit) {
  const KeySource& source = args.sets[set];
  float* sums = source.colsum + unit * source.colsum_stride;
  const int64_t count = key_count(source, unit);
  const int64_t stride = partial_stride[set];
  const float* all =
      partial[set].const_data_ptr<float>() + unit * tasks_of_unit * partials * stride;
  std::fill_n(sums, source.count, 0.0F);
  // In place: the sums of head g over the tasks gather in its partial of the first task.
  float* by_head =
      partial[set].mutable_data_ptr<float>() + unit * tasks_of_unit * partials * stride;
  for (int64_t g = 0; g < partials; ++g) {
    float* total = by_head + g * stride;
    for (int64_t t = 1; t < tasks_of_unit; ++t) {
      const float* part = all + (t * partials + g) * stride;
      for (int64_t j = 0; j < count; ++j) total[j] += part[j];
    }
    for (int64_t j = 0; j < count; ++j)
      sums[j] = args.reduce_max ? std::max(sums[j], total[j]) : sums[j] + total[j];
  }
}

void AttendChunk::run(const AttendChunkArgs& args) {
  Impl& m = *impl_;
  const int64_t units = args.key.batch * args.key.heads;
  const int64_t tasks_of_unit = (args.rows + m.task_rows - 1) / m.task_rows;
  m.pack(args);
  parallel_tasks(units * tasks_of_unit, [&](int64_t task, int64_t thread) {
    m.attend_task(args, task, tasks_of_unit, thread);
  });
  parallel_tasks(units * args.num_sets, [&](int64_t i, int64_t) {
    const int set = static_cast<int>(i % args.num_sets);
    if (args.sets[set].colsum) m.reduce(args, set, i / args.num_sets, tasks_of_unit);
  });
}

}  // namespace h2o_prefill
