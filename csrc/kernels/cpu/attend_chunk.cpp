#include "kernels/cpu/attend_chunk.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/tasks.h"

namespace h2o_prefill {
namespace {

// Rows of a task: two row blocks or a little less, so that one chunk makes many tasks.
constexpr int64_t kTaskRows = 64;

// Keys of a packing task; a multiple of every panel.
constexpr int64_t kPackKeys = 256;

// Keys of a task that reduces column sums.
constexpr int64_t kReduceKeys = 256;

// Tasks that pack: each packs a range of the keys, or the values, of one set of one unit.
struct PackGrid {
  int64_t units;
  int64_t sets;
  int64_t ranges;

  struct Task {
    int64_t unit;
    int set;
    bool is_key;
    int64_t begin;  // of the range, in the set
  };

  int64_t count() const { return units * sets * 2 * ranges; }
  Task at(int64_t i) const {
    return {.unit = i / ranges / 2 / sets,
            .set = static_cast<int>(i / ranges / 2 % sets),
            .is_key = i / ranges % 2 == 0,
            .begin = i % ranges * kPackKeys};
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

// Tasks that reduce column sums, each of a range of keys of one set of one unit.
struct ReduceGrid {
  int64_t units;
  int64_t sets;
  int64_t ranges;

  struct Task {
    int64_t unit;
    int set;
    int64_t begin;  // of the range, in the set
  };

  int64_t count() const { return units * sets * ranges; }
  Task at(int64_t i) const {
    return {.unit = i / ranges / sets,
            .set = static_cast<int>(i / ranges % sets),
            .begin = i % ranges * kReduceKeys};
  }
};

AttendChunkArgs pass_of(const AttendChunkArgs& call, const RowRange& rows) {
  AttendChunkArgs args = call;
  args.rows = rows;
  args.num_sets = 0;
  return args;
}

void add_range(AttendChunkArgs& args, const CausalRange& range, ColumnSums sums = {}) {
  args.sets[args.num_sets++] = {.kind = KeySource::Kind::kRange, .range = range, .sums = sums};
}

void add_memory(AttendChunkArgs& args, const MemorySetView& memory, ColumnSums sums) {
  args.sets[args.num_sets++] = {.kind = KeySource::Kind::kMemory, .memory = memory, .sums = sums};
}

CausalRange own_keys(const RowRange& rows) {
  return {.begin = rows.position(), .count = rows.count};
}

}  // namespace

AttendChunkArgs chunk_pass(const AttendChunkArgs& call, const RowRange& rows, ColumnSums sums) {
  AttendChunkArgs args = pass_of(call, rows);
  add_range(args, own_keys(rows), sums);
  args.recall = {};
  return args;
}

AttendChunkArgs chunk_and_memory_pass(const AttendChunkArgs& call, const RowRange& rows,
                                      ColumnSums chunk_sums, const MemorySetView& memory,
                                      ColumnSums memory_sums) {
  AttendChunkArgs args = pass_of(call, rows);
  add_range(args, own_keys(rows), chunk_sums);
  add_memory(args, memory, memory_sums);
  return args;
}

AttendChunkArgs memory_pass(const AttendChunkArgs& call, const RowRange& rows,
                            const MemorySetView& memory, ColumnSums sums) {
  AttendChunkArgs args = pass_of(call, rows);
  add_memory(args, memory, sums);
  return args;
}

AttendChunkArgs range_pass(const AttendChunkArgs& call, const RowRange& rows,
                           const CausalRange& first, const CausalRange& second) {
  AttendChunkArgs args = pass_of(call, rows);
  add_range(args, first);
  if (second.count > 0) add_range(args, second);
  return args;
}

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

  void pack(const AttendChunkArgs& args, const PackGrid::Task& task) const;
  KeySet pack_recalled(const AttendChunkArgs& args, int64_t unit, const RowRange& rows,
                       int64_t thread) const;
  void attend(const AttendChunkArgs& args, const AttendGrid& grid, const AttendGrid::Task& task,
              int64_t thread) const;
  void attend_part(const AttendChunkArgs& args, const AttendGrid& grid,
                   const AttendGrid::Task& task, const RowRange& rows, int64_t thread) const;
  void reduce(const AttendChunkArgs& args, const ReduceGrid::Task& task, int64_t blocks) const;
};

AttendChunk::AttendChunk(const HeadsView& query, const HeadsView& key, const HeadsView& value,
                         const RecallView& recall, const AttendLimits& limits, Workspace& workspace)
    : impl_(std::make_unique<Impl>(workspace)) {
  Impl& m = *impl_;
  const CpuKernels& kernels = m.kernels;
  m.units = key.batch * key.heads;
  m.group = query.heads / key.heads;
  if (recall.offsets) {
    for (int64_t i = 0; i < key.batch * recall.blocks; ++i) {
      m.max_recalled = std::max<int64_t>(m.max_recalled, recall.offsets[i + 1] - recall.offsets[i]);
    }
  }
  const int64_t partials = m.units * divide_up(limits.rows, kTaskRows) * m.group;
  for (int s = 0; s < 2; ++s) {
    Impl::SetParts& parts = m.sets[s];
    parts.key_floats = kernels.packed_key_floats(limits.keys[s], key.dim, key.dtype);
    parts.value_floats = kernels.packed_value_floats(limits.keys[s], value.dim, key.dtype);
    parts.partial_stride = kernels.padded(limits.keys[s]);
    parts.keys = workspace.add<float>(m.units * parts.key_floats);
    parts.values = workspace.add<float>(m.units * parts.value_floats);
    parts.partial = workspace.add<float>(partials * parts.partial_stride);
  }
  Impl::ThreadParts& parts = m.thread_parts;
  parts.scratch_floats = Workspace::whole_lines<float>(kernels.scratch_floats(
      key.dim, value.dim, std::max({limits.keys[0], limits.keys[1], m.max_recalled})));
  parts.recalled_floats = Workspace::whole_lines<float>(
      kernels.packed_key_floats(m.max_recalled, key.dim, key.dtype) +
      kernels.packed_value_floats(m.max_recalled, value.dim, key.dtype));
  parts.scratch = workspace.add<float>(m.threads * parts.scratch_floats);
  parts.recalled = workspace.add<float>(m.threads * parts.recalled_floats);
  parts.positions = workspace.add<int32_t>(m.threads * m.max_recalled);
  for (auto& part : parts.limits) part = workspace.add<int32_t>(m.threads * kTaskRows);
  for (auto& part : parts.begins) part = workspace.add<int32_t>(m.threads * kTaskRows);
}

AttendChunk::~AttendChunk() = default;

// The conversion to words happens here, once for all heads of a group.
void AttendChunk::Impl::pack(const AttendChunkArgs& args, const PackGrid::Task& task) const {
  const KeySource& set = args.sets[task.set];
  const SetParts& parts = sets[task.set];
  const HeadsView& from = task.is_key ? args.key : args.value;
  const bool is_range = set.kind == KeySource::Kind::kRange;
  const int64_t count = set.count(task.unit);
  if (task.begin >= count) return;
  PackArgs pack{
      .data =
          from.row(task.unit / from.heads, task.unit % from.heads, is_range ? set.range.begin : 0),
      .dtype = from.dtype,
      .stride_row = from.stride_row,
      .positions = is_range ? nullptr : set.memory.of_unit(task.unit),
      .count = count,
      .begin = task.begin,
      .end = std::min(task.begin + kPackKeys, count),
      .dim = from.dim,
      .packed = nullptr,
  };
  if (task.is_key) {
    pack.packed = workspace.get(parts.keys) + task.unit * parts.key_floats;
    kernels.pack_keys(pack);
  } else {
    pack.packed = workspace.get(parts.values) + task.unit * parts.value_floats;
    kernels.pack_values(pack);
  }
}

// Recalled keys that the rows of one recall block see: keys of the block's list that lie before
// the pass's rows and are not in the head's memory set. Each row sees a prefix, since the list
// rises with visible_from.
KeySet AttendChunk::Impl::pack_recalled(const AttendChunkArgs& args, int64_t unit,
                                        const RowRange& rows, int64_t thread) const {
  const RecallView& recall = args.recall;
  const int64_t b = unit / args.key.heads;
  const int64_t h = unit % args.key.heads;
  const int64_t list = recall.list(b, rows.begin);
  const int32_t* memory = nullptr;
  int64_t members = 0;
  for (int s = 0; s < args.num_sets; ++s) {
    if (args.sets[s].kind != KeySource::Kind::kMemory) continue;
    memory = args.sets[s].memory.of_unit(unit);
    members = args.sets[s].memory.count(unit);
  }
  int32_t* const kept = workspace.get(thread_parts.positions) + thread * max_recalled;
  int32_t* const limits = workspace.get(thread_parts.limits[2]) + thread * kTaskRows;
  int64_t count = 0;
  int64_t r = 0;
  for (int64_t i = recall.offsets[list]; i < recall.offsets[list + 1]; ++i) {
    const int32_t position = recall.positions[i];
    while (r < rows.count && rows.position() + r < recall.visible_from[i]) {
      limits[r++] = static_cast<int32_t>(count);
    }
    if (r == rows.count) break;
    if (position >= args.rows.position()) continue;
    if (std::binary_search(memory, memory + members, position)) continue;
    kept[count++] = position;
  }
  while (r < rows.count) limits[r++] = static_cast<int32_t>(count);

  float* const keys = workspace.get(thread_parts.recalled) + thread * thread_parts.recalled_floats;
  float* const values = keys + kernels.packed_key_floats(count, args.key.dim, args.key.dtype);
  const auto pack = [&](const HeadsView& from, float* packed) {
    return PackArgs{.data = from.row(b, h, 0),
                    .dtype = from.dtype,
                    .stride_row = from.stride_row,
                    .positions = kept,
                    .count = count,
                    .begin = 0,
                    .end = count,
                    .dim = from.dim,
                    .packed = packed};
  };
  kernels.pack_keys(pack(args.key, keys));
  kernels.pack_values(pack(args.value, values));
  return {.keys = keys, .values = values, .count = count, .limits = limits, .colsum = nullptr};
}

void AttendChunk::Impl::attend(const AttendChunkArgs& args, const AttendGrid& grid,
                               const AttendGrid::Task& task, int64_t thread) const {
  const int64_t first = args.rows.begin + task.block * kTaskRows;
  const int64_t end = std::min(first + kTaskRows, args.rows.begin + args.rows.count);
  for (int s = 0; s < args.num_sets; ++s) {
    const KeySource& set = args.sets[s];
    if (!set.sums.data) continue;
    const int64_t visible = set.kind == KeySource::Kind::kRange
                                ? set.range.visible_from(args.rows.past + end - 1)
                                : set.count(task.unit);
    for (int64_t g = task.first_head; g < task.first_head + task.heads; ++g) {
      std::fill_n(partial_sums(s, task.unit, grid.blocks, task.block, g), kernels.padded(visible),
                  0.0F);
    }
  }
  // Rows of different recall blocks see different keys.
  const int64_t block = args.recall.offsets ? args.recall.block : end;
  for (int64_t row = first; row < end;) {
    const int64_t next = std::min(end, (row / block + 1) * block);
    attend_part(args, grid, task, {.begin = row, .count = next - row, .past = args.rows.past},
                thread);
    row = next;
  }
  if (kernels.gemm_release) kernels.gemm_release();
}

// Rows of one recall block, or all of a task's.
void AttendChunk::Impl::attend_part(const AttendChunkArgs& args, const AttendGrid& grid,
                                    const AttendGrid::Task& task, const RowRange& rows,
                                    int64_t thread) const {
  const int64_t b = task.unit / args.key.heads;
  const int64_t h = task.unit % args.key.heads;
  KeySet packed[3];
  int num_sets = 0;
  for (; num_sets < args.num_sets; ++num_sets) {
    const KeySource& set = args.sets[num_sets];
    const SetParts& parts = sets[num_sets];
    const bool is_range = set.kind == KeySource::Kind::kRange;
    int32_t* limits = nullptr;
    if (is_range && set.range.visible_from(rows.position()) < set.range.count) {
      limits = workspace.get(thread_parts.limits[num_sets]) + thread * kTaskRows;
      for (int64_t r = 0; r < rows.count; ++r) {
        limits[r] = static_cast<int32_t>(set.range.visible_from(rows.position() + r));
      }
    }
    int32_t* begins = nullptr;
    if (is_range && set.range.hidden_from(rows.position() + rows.count - 1) > 0) {
      begins = workspace.get(thread_parts.begins[num_sets]) + thread * kTaskRows;
      for (int64_t r = 0; r < rows.count; ++r) {
        begins[r] = static_cast<int32_t>(set.range.hidden_from(rows.position() + r));
      }
    }
    packed[num_sets] = {.keys = workspace.get(parts.keys) + task.unit * parts.key_floats,
                        .values = workspace.get(parts.values) + task.unit * parts.value_floats,
                        .count = set.count(task.unit),
                        .limits = limits,
                        .colsum = nullptr,
                        .begins = begins};
  }
  if (args.recall.offsets) {
    packed[num_sets] = pack_recalled(args, task.unit, rows, thread);
    num_sets += packed[num_sets].count > 0;
  }

  AttendRowsArgs attend{};
  attend.dtype = args.query.dtype;
  attend.out_dtype = args.out.dtype;
  attend.query_stride = args.query.stride_row;
  attend.out_stride = args.out.stride_row;
  attend.earlier_stride = args.earlier.stride_row;
  attend.rows = rows.count;
  attend.head_dim = args.key.dim;
  attend.value_dim = args.value.dim;
  attend.scale = args.scale;
  attend.softcap = args.softcap;
  attend.sets = packed;
  attend.num_sets = num_sets;
  attend.gemm = kernels.gemm;
  attend.scratch = workspace.get(thread_parts.scratch) + thread * thread_parts.scratch_floats;
  for (int64_t g = task.first_head; g < task.first_head + task.heads; ++g) {
    const int64_t head = h * group + g;
    for (int s = 0; s < args.num_sets; ++s) {
      if (!args.sets[s].sums.data) continue;
      packed[s].colsum = partial_sums(s, task.unit, grid.blocks, task.block, g);
    }
    attend.sink = args.sinks ? args.sinks[head] : kNegInf;
    attend.query = args.query.row(b, head, rows.begin);
    attend.out = args.out.row(b, head, rows.begin);
    if (args.earlier.data) {
      attend.earlier = static_cast<const float*>(args.earlier.row(b, head, rows.begin));
    }
    attend.lse = args.lse + (b * args.query.heads + head) * args.query.length + rows.begin;
    kernels.attend_rows(attend);
  }
}

// Reduces partial column sums, always in the same order.
void AttendChunk::Impl::reduce(const AttendChunkArgs& args, const ReduceGrid::Task& task,
                               int64_t blocks) const {
  const KeySource& set = args.sets[task.set];
  float* const sums = set.sums.data + task.unit * set.sums.stride;
  const int64_t end = std::min(task.begin + kReduceKeys, set.width());
  const int64_t count = std::min(end, set.count(task.unit));
  for (int64_t j = task.begin; j < end; ++j) sums[j] = 0.0F;
  for (int64_t g = 0; g < group; ++g) {
    // In place: the sums of a head are accumulated in its last partial, the longest one of a causal
    // range.
    float* const total = partial_sums(task.set, task.unit, blocks, blocks - 1, g);
    for (int64_t block = 0; block + 1 < blocks; ++block) {
      const float* const part = partial_sums(task.set, task.unit, blocks, block, g);
      const int64_t last = args.rows.position() + (block + 1) * kTaskRows - 1;
      const int64_t visible =
          set.kind == KeySource::Kind::kRange ? set.range.visible_from(last) : count;
      for (int64_t j = task.begin; j < std::min(count, visible); ++j) total[j] += part[j];
    }
    for (int64_t j = task.begin; j < count; ++j) {
      sums[j] = args.reduce_max ? std::max(sums[j], total[j]) : sums[j] + total[j];
    }
  }
}

void AttendChunk::run(const AttendChunkArgs& args) {
  const Impl& m = *impl_;
  int64_t most_keys = 0;
  int64_t all_keys = 0;
  bool any_sums = false;
  for (int s = 0; s < args.num_sets; ++s) {
    const int64_t keys = args.sets[s].width();
    most_keys = std::max(most_keys, keys);
    all_keys += keys;
    any_sums |= args.sets[s].sums.data != nullptr;
  }
  const int64_t work =
      m.units * m.group * args.rows.count * all_keys * (args.key.dim + args.value.dim);
  const int64_t threads = work < kSerialWork ? 1 : m.threads;

  const PackGrid packing{
      .units = m.units, .sets = args.num_sets, .ranges = divide_up(most_keys, kPackKeys)};
  for_each_task(packing, threads, [&](const PackGrid::Task& task, int64_t) { m.pack(args, task); });

  const int64_t blocks = divide_up(args.rows.count, kTaskRows);
  // A task takes all query heads of a KV head, which share its packed keys in L2, and what it packs
  // of recalled ones, if that leaves enough tasks; otherwise it takes one query head.
  const bool whole_groups = m.units * blocks >= kTasksPerThread * threads;
  const AttendGrid attending{
      .units = m.units, .blocks = blocks, .shares = whole_groups ? 1 : m.group, .group = m.group};
  for_each_task(attending, threads, [&](const AttendGrid::Task& task, int64_t thread) {
    m.attend(args, attending, task, thread);
  });

  if (!any_sums) return;
  const ReduceGrid reducing{
      .units = m.units, .sets = args.num_sets, .ranges = divide_up(most_keys, kReduceKeys)};
  for_each_task(reducing, threads, [&](const ReduceGrid::Task& task, int64_t) {
    if (args.sets[task.set].sums.data) m.reduce(args, task, blocks);
  });
}

}  // namespace h2o_prefill
