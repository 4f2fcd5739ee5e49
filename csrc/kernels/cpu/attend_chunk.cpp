#include "kernels/cpu/attend_chunk.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/tasks.h"

namespace h2o_prefill {
namespace {

// Rows of a task: two row blocks or a little less, so that one chunk makes many tasks.
constexpr int64_t kTaskRows = 64;

// Keys of a task that packs, a multiple of every panel, or that reduces column sums.
constexpr int64_t kRangeKeys = 256;

// Tasks of a range of the keys of one set of one unit; a set has `parts`.
struct RangeGrid {
  int64_t units;
  int64_t sets;
  int64_t parts;
  int64_t ranges;

  struct Task {
    int64_t unit;
    int64_t set;
    int64_t part;
    int64_t begin;  // of the range, in the set
  };

  int64_t count() const { return units * sets * parts * ranges; }
  Task at(int64_t i) const {
    const int64_t part = i / ranges;
    return {.unit = part / parts / sets,
            .set = part / parts % sets,
            .part = part % parts,
            .begin = i % ranges * kRangeKeys};
  }
};

// Tasks that attend: each has one block of rows, for some query heads of one unit.
struct AttendGrid {
  int64_t units;
  int64_t blocks;  // of rows
  int64_t shares;  // tasks that share the query heads of a group
  int64_t group;

  struct Task {
    int64_t unit;
    int64_t block;
    int64_t first_head;  // of the group
    int64_t heads;
  };

  int64_t count() const { return units * blocks * shares; }
  // The last rows of a causal range see the most keys, so they are scheduled first.
  Task at(int64_t i) const {
    return {.unit = i / (blocks * shares),
            .block = blocks - 1 - i / shares % blocks,
            .first_head = i % shares * (group / shares),
            .heads = group / shares};
  }
};

// The arguments of AttendChunk::run().
struct Pass : AttentionCall {
  RowRange rows;
  c10::ArrayRef<KeySource> sets;

  int64_t num_sets() const { return static_cast<int64_t>(sets.size()); }
  bool recalls() const { return recall.offsets && sets.back().is_memory; }
};

}  // namespace

struct AttendChunk::Impl {
  const CpuKernels& kernels = cpu_kernels();
  const Workspace& workspace;
  int64_t threads = at::get_num_threads();
  int64_t units;
  int64_t group;  // query heads of a KV head
  int64_t max_recalled = 0;

  // Workspace of one key set.
  struct SetParts {
    int64_t key_floats;  // packed, of one unit
    int64_t value_floats;
    int64_t partial_stride;
    Workspace::Part<float> keys;    // [units, key_floats]
    Workspace::Part<float> values;  // [units, value_floats]
    // Partial column sums [unit, row block, head of the group, partial_stride]. Heads are kept
    // apart so that either reduction is exact and in a fixed order.
    Workspace::Part<float> partial;
  };
  SetParts sets[2];

  // Workspace of one thread.
  struct ThreadParts {
    int64_t scratch_floats;  // of attend_rows
    int64_t recalled_floats;
    Workspace::Part<float> scratch;      // [threads, scratch_floats]
    Workspace::Part<float> recalled;     // [threads, recalled_floats]: packed keys and values
    Workspace::Part<int32_t> positions;  // [threads, max_recalled]
    Workspace::Part<int32_t> limits[3];  // [threads, kTaskRows]: of each set, of recalled keys
    Workspace::Part<int32_t> begins[2];  // [threads, kTaskRows]: of each set
  };
  ThreadParts thread_parts;

  explicit Impl(const Workspace& workspace) : workspace(workspace) {}

  float* partial_sums(int set, int64_t unit, int64_t blocks, int64_t block, int64_t g) const {
    const SetParts& parts = sets[set];
    return workspace.get(parts.partial) +
           ((unit * blocks + block) * group + g) * parts.partial_stride;
  }

  void pack(const Pass& pass, const RangeGrid::Task& task) const;
  KeySet pack_recalled(const Pass& pass, int64_t unit, const RowRange& rows, int64_t thread) const;
  void attend(const Pass& pass, const AttendGrid& grid, const AttendGrid::Task& task,
              int64_t thread) const;
  void attend_part(const Pass& pass, const AttendGrid& grid, const AttendGrid::Task& task,
                   const RowRange& rows, int64_t thread) const;
  void reduce(const Pass& pass, const RangeGrid::Task& task, int64_t blocks) const;
};

AttendChunk::AttendChunk(const AttentionCall& call, const AttendLimits& limits,
                         Workspace& workspace)
    : impl_(std::make_unique<Impl>(workspace)) {
  Impl& m = *impl_;
  const CpuKernels& kernels = m.kernels;
  m.units = call.key.batch * call.key.heads;
  m.group = call.query.heads / call.key.heads;
  if (call.recall.offsets) {
    for (int64_t i = 0; i < call.key.batch * call.recall.blocks; ++i) {
      m.max_recalled =
          std::max<int64_t>(m.max_recalled, call.recall.offsets[i + 1] - call.recall.offsets[i]);
    }
  }
  const int64_t partials = m.units * divide_up(limits.rows, kTaskRows) * m.group;
  for (int s = 0; s < 2; ++s) {
    Impl::SetParts& parts = m.sets[s];
    parts.key_floats = kernels.packed_key_floats(limits.keys[s], call.key.dim, call.key.dtype);
    parts.value_floats =
        kernels.packed_value_floats(limits.keys[s], call.value.dim, call.key.dtype);
    parts.partial_stride = kernels.padded(limits.keys[s]);
    parts.keys = workspace.add<float>(m.units * parts.key_floats);
    parts.values = workspace.add<float>(m.units * parts.value_floats);
    parts.partial = workspace.add<float>(partials * parts.partial_stride);
  }
  Impl::ThreadParts& parts = m.thread_parts;
  parts.scratch_floats = Workspace::whole_lines<float>(kernels.scratch_floats(
      call.key.dim, call.value.dim, std::max({limits.keys[0], limits.keys[1], m.max_recalled})));
  parts.recalled_floats = Workspace::whole_lines<float>(
      kernels.packed_key_floats(m.max_recalled, call.key.dim, call.key.dtype) +
      kernels.packed_value_floats(m.max_recalled, call.value.dim, call.key.dtype));
  parts.scratch = workspace.add<float>(m.threads * parts.scratch_floats);
  parts.recalled = workspace.add<float>(m.threads * parts.recalled_floats);
  parts.positions = workspace.add<int32_t>(m.threads * m.max_recalled);
  for (auto& part : parts.limits) part = workspace.add<int32_t>(m.threads * kTaskRows);
  for (auto& part : parts.begins) part = workspace.add<int32_t>(m.threads * kTaskRows);
}

AttendChunk::~AttendChunk() = default;

// Packs a range of the keys, or the values, of a set. The conversion to words happens here, once
// for all heads of a group.
void AttendChunk::Impl::pack(const Pass& pass, const RangeGrid::Task& task) const {
  const KeySource& set = pass.sets[task.set];
  const SetParts& parts = sets[task.set];
  const bool is_key = task.part == 0;
  const HeadsView& from = is_key ? pass.key : pass.value;
  const int64_t count = set.count(task.unit);
  if (task.begin >= count) return;
  float* const packed = is_key ? workspace.get(parts.keys) + task.unit * parts.key_floats
                               : workspace.get(parts.values) + task.unit * parts.value_floats;
  PackArgs args = pack_whole(
      from.row(task.unit / from.heads, task.unit % from.heads, set.is_memory ? 0 : set.range.begin),
      from.dtype, from.stride_row, set.is_memory ? set.memory.of_unit(task.unit) : nullptr, count,
      from.dim, packed);
  args.begin = task.begin;
  args.end = std::min(task.begin + kRangeKeys, count);
  is_key ? kernels.pack_keys(args) : kernels.pack_values(args);
}

// Recalled keys that the rows of one recall block see: keys of the block's list that lie before
// the pass's rows and are not in the head's memory set. Each row sees a prefix, since the list
// rises with visible_from.
KeySet AttendChunk::Impl::pack_recalled(const Pass& pass, int64_t unit, const RowRange& rows,
                                        int64_t thread) const {
  const RecallView& recall = pass.recall;
  const int64_t b = unit / pass.key.heads;
  const int64_t h = unit % pass.key.heads;
  const int64_t list = recall.list(b, rows.begin);
  const int32_t* const memory = pass.sets.back().memory.of_unit(unit);
  const int64_t members = pass.sets.back().memory.count(unit);
  int32_t* const unseen = workspace.get(thread_parts.positions) + thread * max_recalled;
  int32_t* const limits = workspace.get(thread_parts.limits[2]) + thread * kTaskRows;
  int64_t count = 0;
  int64_t r = 0;
  for (int64_t i = recall.offsets[list]; i < recall.offsets[list + 1]; ++i) {
    const int32_t position = recall.positions[i];
    while (r < rows.count && rows.position() + r < recall.visible_from[i]) {
      limits[r++] = static_cast<int32_t>(count);
    }
    if (r == rows.count) break;
    if (position >= pass.rows.position()) continue;
    if (std::binary_search(memory, memory + members, position)) continue;
    unseen[count++] = position;
  }
  while (r < rows.count) limits[r++] = static_cast<int32_t>(count);

  float* const keys = workspace.get(thread_parts.recalled) + thread * thread_parts.recalled_floats;
  float* const values = keys + kernels.packed_key_floats(count, pass.key.dim, pass.key.dtype);
  const auto pack = [&](const HeadsView& from, float* packed) {
    return pack_whole(from.row(b, h, 0), from.dtype, from.stride_row, unseen, count, from.dim,
                      packed);
  };
  kernels.pack_keys(pack(pass.key, keys));
  kernels.pack_values(pack(pass.value, values));
  return {.keys = keys, .values = values, .count = count, .limits = limits};
}

void AttendChunk::Impl::attend(const Pass& pass, const AttendGrid& grid,
                               const AttendGrid::Task& task, int64_t thread) const {
  const int64_t first = pass.rows.begin + task.block * kTaskRows;
  const int64_t end = std::min(first + kTaskRows, pass.rows.begin + pass.rows.count);
  for (int s = 0; s < pass.num_sets(); ++s) {
    const KeySource& set = pass.sets[s];
    if (!set.sums.data) continue;
    const int64_t visible =
        set.is_memory ? set.count(task.unit) : set.range.visible_from(pass.rows.past + end - 1);
    for (int64_t g = task.first_head; g < task.first_head + task.heads; ++g) {
      std::fill_n(partial_sums(s, task.unit, grid.blocks, task.block, g), kernels.padded(visible),
                  0.0F);
    }
  }
  // Rows of different recall blocks see different keys.
  const int64_t block = pass.recalls() ? pass.recall.block : end;
  for (int64_t row = first; row < end;) {
    const int64_t next = std::min(end, (row / block + 1) * block);
    attend_part(pass, grid, task, {.begin = row, .count = next - row, .past = pass.rows.past},
                thread);
    row = next;
  }
  if (kernels.gemm_release) kernels.gemm_release();
}

// Rows of one recall block, or all of a task's.
void AttendChunk::Impl::attend_part(const Pass& pass, const AttendGrid& grid,
                                    const AttendGrid::Task& task, const RowRange& rows,
                                    int64_t thread) const {
  const int64_t b = task.unit / pass.key.heads;
  const int64_t h = task.unit % pass.key.heads;
  KeySet packed[3];
  int num_sets = 0;
  for (; num_sets < pass.num_sets(); ++num_sets) {
    const KeySource& set = pass.sets[num_sets];
    const SetParts& parts = sets[num_sets];
    const auto by_row = [&](const Workspace::Part<int32_t>& part, const auto& bound_of) {
      int32_t* const bounds = workspace.get(part) + thread * kTaskRows;
      for (int64_t r = 0; r < rows.count; ++r) {
        bounds[r] = static_cast<int32_t>(bound_of(rows.position() + r));
      }
      return bounds;
    };
    // Rows see all of a memory set, whose range is empty.
    KeySet& keys = packed[num_sets];
    keys = {.keys = workspace.get(parts.keys) + task.unit * parts.key_floats,
            .values = workspace.get(parts.values) + task.unit * parts.value_floats,
            .count = set.count(task.unit)};
    if (set.range.visible_from(rows.position()) < set.range.count) {
      keys.limits = by_row(thread_parts.limits[num_sets],
                           [&](int64_t position) { return set.range.visible_from(position); });
    }
    if (set.range.hidden_from(rows.position() + rows.count - 1) > 0) {
      keys.begins = by_row(thread_parts.begins[num_sets],
                           [&](int64_t position) { return set.range.hidden_from(position); });
    }
  }
  if (pass.recalls()) {
    packed[num_sets] = pack_recalled(pass, task.unit, rows, thread);
    num_sets += packed[num_sets].count > 0;
  }

  AttendRowsArgs attend{};
  attend.dtype = pass.query.dtype;
  attend.out_dtype = pass.out.dtype;
  attend.query_stride = pass.query.stride_row;
  attend.out_stride = pass.out.stride_row;
  attend.earlier_stride = pass.earlier.stride_row;
  attend.rows = rows.count;
  attend.head_dim = pass.key.dim;
  attend.value_dim = pass.value.dim;
  attend.scale = pass.scale;
  attend.softcap = pass.softcap;
  attend.sets = packed;
  attend.num_sets = num_sets;
  attend.gemm = kernels.gemm;
  attend.scratch = workspace.get(thread_parts.scratch) + thread * thread_parts.scratch_floats;
  for (int64_t g = task.first_head; g < task.first_head + task.heads; ++g) {
    const int64_t head = h * group + g;
    for (int s = 0; s < pass.num_sets(); ++s) {
      if (!pass.sets[s].sums.data) continue;
      packed[s].colsum = partial_sums(s, task.unit, grid.blocks, task.block, g);
    }
    attend.sink = pass.sinks ? pass.sinks[head] : kNegInf;
    attend.query = pass.query.row(b, head, rows.begin);
    attend.out = pass.out.row(b, head, rows.begin);
    if (pass.earlier.data) {
      attend.earlier = static_cast<const float*>(pass.earlier.row(b, head, rows.begin));
    }
    attend.lse = pass.lse + (b * pass.query.heads + head) * pass.query.length + rows.begin;
    kernels.attend_rows(attend);
  }
}

// Reduces partial column sums, always in the same order.
void AttendChunk::Impl::reduce(const Pass& pass, const RangeGrid::Task& task,
                               int64_t blocks) const {
  const KeySource& set = pass.sets[task.set];
  float* const sums = set.sums.data + task.unit * set.sums.stride;
  const int64_t end = std::min(task.begin + kRangeKeys, set.width());
  const int64_t count = std::min(end, set.count(task.unit));
  for (int64_t j = task.begin; j < end; ++j) sums[j] = 0.0F;
  for (int64_t g = 0; g < group; ++g) {
    // In place: the sums of a head are accumulated in its last partial, the longest one of a causal
    // range.
    float* const total = partial_sums(task.set, task.unit, blocks, blocks - 1, g);
    for (int64_t block = 0; block + 1 < blocks; ++block) {
      const float* const part = partial_sums(task.set, task.unit, blocks, block, g);
      const int64_t last = pass.rows.position() + (block + 1) * kTaskRows - 1;
      const int64_t visible = set.is_memory ? count : set.range.visible_from(last);
      for (int64_t j = task.begin; j < std::min(count, visible); ++j) total[j] += part[j];
    }
    for (int64_t j = task.begin; j < count; ++j) {
      sums[j] = pass.reduce_max ? std::max(sums[j], total[j]) : sums[j] + total[j];
    }
  }
}

void AttendChunk::run(const AttentionCall& call, const RowRange& rows,
                      c10::ArrayRef<KeySource> sets) {
  const Impl& m = *impl_;
  const Pass pass{call, rows, sets};
  int64_t most_keys = 0;
  int64_t all_keys = 0;
  bool any_sums = false;
  for (const KeySource& set : sets) {
    most_keys = std::max(most_keys, set.width());
    all_keys += set.width();
    any_sums |= set.sums.data != nullptr;
  }
  const int64_t work = m.units * m.group * rows.count * all_keys * (call.key.dim + call.value.dim);
  const int64_t threads = work < kSerialWork ? 1 : m.threads;

  RangeGrid ranges{.units = m.units,
                   .sets = pass.num_sets(),
                   .parts = 2,  // keys and values
                   .ranges = divide_up(most_keys, kRangeKeys)};
  for_each_task(ranges, threads, [&](const RangeGrid::Task& task, int64_t) { m.pack(pass, task); });

  const int64_t blocks = divide_up(rows.count, kTaskRows);
  // A task takes all query heads of a KV head, which share its packed keys in L2, and what it packs
  // of recalled ones, if that leaves enough tasks; otherwise it takes one query head.
  const bool whole_groups = m.units * blocks >= kTasksPerThread * threads;
  const AttendGrid attending{
      .units = m.units, .blocks = blocks, .shares = whole_groups ? 1 : m.group, .group = m.group};
  for_each_task(attending, threads, [&](const AttendGrid::Task& task, int64_t thread) {
    m.attend(pass, attending, task, thread);
  });

  if (!any_sums) return;
  ranges.parts = 1;
  for_each_task(ranges, threads, [&](const RangeGrid::Task& task, int64_t) {
    if (sets[task.set].sums.data) m.reduce(pass, task, blocks);
  });
}

}  // namespace h2o_prefill
