#include "kernels/cpu/attend_chunk.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "kernels/cpu/attend_rows.h"

namespace h2o_prefill {
namespace {

// Rows of a task: two row blocks or a little less, so that one chunk makes many tasks.
constexpr int64_t kTaskRows = 64;

// Keys of a packing task; a multiple of every panel.
constexpr int64_t kPackKeys = 256;

// A task takes all query heads of a KV head, which share its packed keys in L2, where that leaves
// each thread this many tasks; else it takes one.
constexpr int64_t kTasksPerThread = 4;

// Multiply-adds below which waking other threads costs more than they save.
constexpr int64_t kSerialWork = 1 << 19;

// Runs task(i, thread) for i in [0, n); threads take the next task as they become free. Each task
// writes only what is its own, so the result does not depend on who runs it.
template <typename Task>
void parallel_tasks(int64_t n, int64_t max_threads, const Task& task) {
  const int64_t threads = std::min(n, max_threads);
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) task(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t i = next++; i < n; i = next++) task(i, thread);
    }
  });
}

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A part of the workspace: where its pointer goes, and its size.
struct Part {
  float** pointer;
  int64_t floats;
};

// Floats in whole cache lines.
int64_t whole_lines(int64_t floats) { return divide_up(floats, 16) * 16; }

// All parts in one tensor, each at the beginning of a cache line.
at::Tensor allocate(std::initializer_list<Part> parts) {
  int64_t total = 0;
  for (const Part& part : parts) total += whole_lines(part.floats);
  auto workspace = at::empty({total}, at::TensorOptions().dtype(at::kFloat));
  float* next = workspace.mutable_data_ptr<float>();
  for (const Part& part : parts) {
    *part.pointer = next;
    next += whole_lines(part.floats);
  }
  return workspace;
}

}  // namespace

struct AttendChunk::Impl {
  const CpuKernels& kernels = cpu_kernels();
  int64_t threads = at::get_num_threads();
  int64_t group;      // query heads of a KV head
  int64_t task_rows;  // a recall block is a whole number of tasks
  int64_t max_recalled = 0;
  int64_t key_floats[2];  // packed keys of one (batch row, KV head)
  int64_t value_floats[2];
  int64_t partial_stride[2];
  int64_t recalled_floats;
  int64_t thread_floats;
  int64_t thread_ints;
  at::Tensor workspace;
  float* packed_keys[2];
  float* packed_values[2];
  // Partial column sums [unit, row block, head of the group, partial_stride]. Heads are kept apart
  // so that either reduction is exact and in a fixed order.
  float* partial[2];
  float* thread_scratch;      // [threads, thread_floats]
  float* thread_int_scratch;  // [threads, thread_ints] of int32

  int64_t key_count(const KeySource& set, int64_t unit) const {
    return set.counts ? set.counts[unit] : set.count;
  }
  float* partial_sums(int set, int64_t unit, int64_t blocks, int64_t block, int64_t g) const {
    return partial[set] + ((unit * blocks + block) * group + g) * partial_stride[set];
  }

  void pack(const AttendChunkArgs& args, int64_t task, int64_t ranges) const;
  KeySet pack_recalled(const AttendChunkArgs& args, int64_t b, int64_t h, int64_t row, int64_t rows,
                       float* packed, int32_t* ints) const;
  void attend(const AttendChunkArgs& args, int64_t unit, int64_t block, int64_t blocks,
              int64_t first_head, int64_t heads, int64_t thread) const;
  void reduce(const AttendChunkArgs& args, int set, int64_t unit, int64_t blocks) const;
};

AttendChunk::AttendChunk(const HeadsView& query, const HeadsView& key, const HeadsView& value,
                         const RecallSource& recall, int64_t max_rows, int64_t max_keys0,
                         int64_t max_keys1)
    : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  const CpuKernels& kernels = m.kernels;
  const int64_t units = key.batch * key.heads;
  m.group = key.heads ? query.heads / key.heads : 0;
  m.task_rows = recall.offsets ? std::gcd(recall.block, kTaskRows) : kTaskRows;
  if (recall.offsets) {
    for (int64_t i = 0; i < key.batch * recall.blocks; ++i) {
      m.max_recalled = std::max<int64_t>(m.max_recalled, recall.offsets[i + 1] - recall.offsets[i]);
    }
  }
  const int64_t max_keys[2] = {max_keys0, max_keys1};
  for (int s = 0; s < 2; ++s) {
    m.key_floats[s] = kernels.packed_key_floats(max_keys[s], key.dim, key.dtype);
    m.value_floats[s] = kernels.packed_value_floats(max_keys[s], value.dim, key.dtype);
    m.partial_stride[s] = kernels.padded(max_keys[s]);
  }
  m.recalled_floats =
      whole_lines(kernels.packed_key_floats(m.max_recalled, key.dim, key.dtype) +
                  kernels.packed_value_floats(m.max_recalled, value.dim, key.dtype));
  m.thread_floats = m.recalled_floats +
                    whole_lines(kernels.scratch_floats(
                        key.dim, value.dim, std::max({max_keys0, max_keys1, m.max_recalled})));
  m.thread_ints = m.max_recalled + 2 * m.task_rows;
  const int64_t partials = units * divide_up(max_rows, m.task_rows) * m.group;
  m.workspace = allocate({{&m.packed_keys[0], units * m.key_floats[0]},
                          {&m.packed_values[0], units * m.value_floats[0]},
                          {&m.partial[0], partials * m.partial_stride[0]},
                          {&m.packed_keys[1], units * m.key_floats[1]},
                          {&m.packed_values[1], units * m.value_floats[1]},
                          {&m.partial[1], partials * m.partial_stride[1]},
                          {&m.thread_scratch, m.threads * m.thread_floats},
                          {&m.thread_int_scratch, m.threads * m.thread_ints}});
}

AttendChunk::~AttendChunk() = default;

// Packs one range of the keys or the values of one set of one (batch row, KV head): the conversion
// to words happens here, once for all heads of a group.
void AttendChunk::Impl::pack(const AttendChunkArgs& args, int64_t task, int64_t ranges) const {
  const int64_t range = task % ranges;
  const bool is_key = task / ranges % 2 == 0;
  const int s = static_cast<int>(task / ranges / 2 % args.num_sets);
  const int64_t unit = task / ranges / 2 / args.num_sets;
  const KeySource& set = args.sets[s];
  const HeadsView& from = is_key ? args.key : args.value;
  PackArgs pack{};
  pack.data = from.row(unit / from.heads, unit % from.heads, set.indices ? 0 : set.begin);
  pack.dtype = from.dtype;
  pack.stride_row = from.stride_row;
  pack.positions = set.indices ? set.indices + unit * set.count : nullptr;
  pack.count = key_count(set, unit);
  pack.begin = range * kPackKeys;
  pack.end = std::min(pack.begin + kPackKeys, pack.count);
  pack.dim = from.dim;
  if (pack.begin >= pack.end) return;
  if (is_key) {
    pack.packed = packed_keys[s] + unit * key_floats[s];
    kernels.pack_keys(pack);
  } else {
    pack.packed = packed_values[s] + unit * value_floats[s];
    kernels.pack_values(pack);
  }
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

  const HeadsView& key = args.key;
  const HeadsView& value = args.value;
  float* packed_value = packed + kernels.packed_key_floats(count, key.dim, key.dtype);
  kernels.pack_keys(
      {key.row(b, h, 0), key.dtype, key.stride_row, kept, count, 0, count, key.dim, packed});
  kernels.pack_values({value.row(b, h, 0), value.dtype, value.stride_row, kept, count, 0, count,
                       value.dim, packed_value});
  return {packed, packed_value, count, limits, nullptr};
}

// One task: a block of rows of some query heads of one (batch row, KV head).
void AttendChunk::Impl::attend(const AttendChunkArgs& args, int64_t unit, int64_t block,
                               int64_t blocks, int64_t first_head, int64_t heads,
                               int64_t thread) const {
  const int64_t b = unit / args.key.heads;
  const int64_t h = unit % args.key.heads;
  const int64_t offset = block * task_rows;
  const int64_t row = args.begin + offset;
  const int64_t rows = std::min(task_rows, args.rows - offset);

  float* scratch = thread_scratch + thread * thread_floats;
  int32_t* ints = reinterpret_cast<int32_t*>(thread_int_scratch) + thread * thread_ints;
  int32_t* causal_limits = ints + max_recalled + task_rows;
  for (int64_t r = 0; r < rows; ++r) causal_limits[r] = static_cast<int32_t>(offset + r + 1);

  KeySet sets[3];
  int num_sets = 0;
  for (; num_sets < args.num_sets; ++num_sets) {
    const KeySource& set = args.sets[num_sets];
    sets[num_sets] = {packed_keys[num_sets] + unit * key_floats[num_sets],
                      packed_values[num_sets] + unit * value_floats[num_sets], key_count(set, unit),
                      set.causal ? causal_limits : nullptr, nullptr};
  }
  if (args.recall.offsets) {
    const KeySet recalled =
        pack_recalled(args, b, h, row, rows, scratch + thread_floats - recalled_floats, ints);
    if (recalled.count) sets[num_sets++] = recalled;
  }

  AttendRowsArgs attend{};
  attend.dtype = args.query.dtype;
  attend.out_dtype = args.out.dtype;
  attend.query_stride = args.query.stride_row;
  attend.out_stride = args.out.stride_row;
  attend.rows = rows;
  attend.head_dim = args.key.dim;
  attend.value_dim = args.value.dim;
  attend.scale = args.scale;
  attend.sets = sets;
  attend.num_sets = num_sets;
  attend.gemm = kernels.gemm;
  attend.scratch = scratch;
  for (int64_t g = first_head; g < first_head + heads; ++g) {
    const int64_t head = h * group + g;
    for (int s = 0; s < args.num_sets; ++s) {
      if (!args.sets[s].colsum) continue;
      const int64_t seen = args.sets[s].causal ? offset + rows : sets[s].count;
      sets[s].colsum = partial_sums(s, unit, blocks, block, g);
      std::fill_n(sets[s].colsum, kernels.padded(seen), 0.0F);
    }
    attend.query = args.query.row(b, head, row);
    attend.out = args.out.row(b, head, row);
    attend.lse = args.lse + (b * args.query.heads + head) * args.query.length + row;
    kernels.attend_rows(attend);
  }
  if (kernels.gemm_release) kernels.gemm_release();
}

// Adds up the partial column sums of one (batch row, KV head), always in the same order.
void AttendChunk::Impl::reduce(const AttendChunkArgs& args, int set, int64_t unit,
                               int64_t blocks) const {
  const KeySource& source = args.sets[set];
  float* sums = source.colsum + unit * source.colsum_stride;
  const int64_t count = key_count(source, unit);
  std::fill_n(sums, source.count, 0.0F);
  for (int64_t g = 0; g < group; ++g) {
    // In place: the sums of a head gather in its last partial, the longest one of a causal set.
    float* total = partial_sums(set, unit, blocks, blocks - 1, g);
    for (int64_t block = 0; block + 1 < blocks; ++block) {
      const float* part = partial_sums(set, unit, blocks, block, g);
      const int64_t seen = source.causal ? std::min((block + 1) * task_rows, count) : count;
      for (int64_t j = 0; j < seen; ++j) total[j] += part[j];
    }
    for (int64_t j = 0; j < count; ++j)
      sums[j] = args.reduce_max ? std::max(sums[j], total[j]) : sums[j] + total[j];
  }
}

void AttendChunk::run(const AttendChunkArgs& args) {
  const Impl& m = *impl_;
  const int64_t units = args.key.batch * args.key.heads;
  const int64_t blocks = divide_up(args.rows, m.task_rows);
  int64_t most_keys = 0;
  int64_t all_keys = 0;
  bool any_colsum = false;
  for (int s = 0; s < args.num_sets; ++s) {
    most_keys = std::max(most_keys, args.sets[s].count);
    all_keys += args.sets[s].count;
    any_colsum |= args.sets[s].colsum != nullptr;
  }
  const int64_t work = units * m.group * args.rows * all_keys * (args.key.dim + args.value.dim);
  const int64_t threads = work < kSerialWork ? 1 : m.threads;

  const int64_t ranges = divide_up(most_keys, kPackKeys);
  parallel_tasks(units * args.num_sets * 2 * ranges, threads,
                 [&](int64_t task, int64_t) { m.pack(args, task, ranges); });

  const bool share = args.recall.offsets || units * blocks >= kTasksPerThread * threads;
  const int64_t heads = share ? m.group : 1;  // of a task
  const int64_t shares = m.group / heads;
  parallel_tasks(units * blocks * shares, threads, [&](int64_t task, int64_t thread) {
    const int64_t unit = task / (blocks * shares);
    // The last rows of a causal range have the most keys: they go first.
    const int64_t block = blocks - 1 - task / shares % blocks;
    m.attend(args, unit, block, blocks, task % shares * heads, heads, thread);
  });

  if (!any_colsum) return;
  parallel_tasks(units * args.num_sets, threads, [&](int64_t task, int64_t) {
    const int set = static_cast<int>(task % args.num_sets);
    if (args.sets[set].colsum) m.reduce(args, set, task / args.num_sets, blocks);
  });
}

}  // namespace h2o_prefill
