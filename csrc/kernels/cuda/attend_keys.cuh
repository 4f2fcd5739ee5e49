// The keys that a tile of query rows attends to, as a sequence of key tiles.
//
// All kinds have the same members:
//   tiles                  number of tiles
//   prepare(j, r), resolve(j, r, lookup)
//                          look up, in two steps, the row in the history of key r of tile j,
//                          counted from the start of the range; negative: absent. What the members
//                          below need of it is there after the next barrier. As many tiles are
//                          known at a time as there are slots.
//   store(j, lookup), row_of(j, r)
//                          of kernels that load any row by any thread: resolves the keys of tile j,
//                          whose rows the block sees after the next barrier
//   fully_masked(j, w)     whether none of the kPartRows rows from w on sees any key of tile j
//   unmasked(j, w)         whether all of these rows see all keys of tile j
//   is_visible(j, r, row)  whether row `row` of the query tile sees key r
#pragma once

#include <type_traits>

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/tile.cuh"

namespace h2o_prefill::attend {

enum class KeyKind { kCausal, kLimited, kGathered };

template <KeyKind kind>
using KindConstant = std::integral_constant<KeyKind, kind>;

// Returns visit(KindConstant) for the kind of a pass.
template <typename Visitor>
cudaError_t with_key_kind(const AttendForwardParams& params, const Visitor& visit) {
  if (params.gathered) return visit(KindConstant<KeyKind::kGathered>());
  if (params.limits) return visit(KindConstant<KeyKind::kLimited>());
  return visit(KindConstant<KeyKind::kCausal>());
}

// Rows of the call that one block works on, of batch row `batch`: of query head `head`, or of the
// heads of its KV head from there on (see PlaceInTile).
struct alignas(16) RowTile {
  int batch;
  int head;
  int kv_head;
  int first;  // row of the call
  int count;
  int position;   // absolute, of the first row
  int key_begin;  // the first key of a causal range that a row of the tile sees
  int lead;       // of the first row, heads that the tile before has
};

// The keys of a range, which need no lookup.
template <int kKeys>
struct KeyRange {
  struct Lookup {};
  static constexpr int kSharedBytes = 0;

  int count;  // keys from the begin of the range to the last one that a row of the tile sees
  int tiles;

  __device__ __forceinline__ explicit KeyRange(int count)
      : count(count), tiles(divide_up(count, kKeys)) {}

  __device__ __forceinline__ Lookup prepare(int /*j*/, int /*r*/) const { return {}; }
  __device__ __forceinline__ int resolve(int j, int r, const Lookup& /*lookup*/) const {
    return row_of(j, r);
  }
  __device__ __forceinline__ void store(int /*j*/, const Lookup& /*lookup*/) const {}
  __device__ __forceinline__ int row_of(int j, int r) const {
    const int key = j * kKeys + r;
    return key < count ? key : -1;
  }
};

// The first keys of the history, as many as a list has for each row; rising.
template <int kPartRows, int kKeys>
struct LimitedKeys : KeyRange<kKeys> {
  const int32_t* limits;

  __device__ __forceinline__ LimitedKeys(const AttendForwardParams& p, const RowTile& rows,
                                         void* /*shared*/)
      : KeyRange<kKeys>(
            min(p.limits[first(p, rows) + rows.count - 1], static_cast<int>(p.key.length))),
        limits(p.limits + first(p, rows)) {}

  __device__ __forceinline__ bool fully_masked(int j, int w) const {
    return j * kKeys >= limits[w + kPartRows - 1];
  }
  __device__ __forceinline__ bool unmasked(int j, int w) const {
    return (j + 1) * kKeys <= limits[w];
  }
  __device__ __forceinline__ bool is_visible(int j, int r, int row) const {
    return j * kKeys + r < limits[row];
  }

 private:
  // In 32 bits, which take fewer registers.
  __device__ __forceinline__ static int first(const AttendForwardParams& p, const RowTile& rows) {
    return rows.batch * p.limits_stride + rows.first;
  }
};

// Keys of a range that ends at the row itself, the last `window` of them.
template <int kPartRows, int kKeys>
struct CausalKeys : KeyRange<kKeys> {
  int diagonal;  // row r sees keys (r + diagonal - window, r + diagonal]
  int window;

  __device__ __forceinline__ CausalKeys(const AttendForwardParams& p, const RowTile& rows,
                                        void* /*shared*/)
      : KeyRange<kKeys>(rows.position - rows.key_begin + rows.count),
        diagonal(rows.position - rows.key_begin),
        window(static_cast<int>(p.causal.window)) {}

  __device__ __forceinline__ bool fully_masked(int j, int w) const {
    const int last = w + kPartRows - 1 + diagonal;
    return j * kKeys > last || j * kKeys + kKeys - 1 <= w + diagonal - window;
  }
  __device__ __forceinline__ bool unmasked(int j, int w) const {
    const int last = w + kPartRows - 1 + diagonal;
    return j * kKeys + kKeys - 1 <= w + diagonal && j * kKeys > last - window;
  }
  __device__ __forceinline__ bool is_visible(int j, int r, int row) const {
    const int key = j * kKeys + r;
    return key <= row + diagonal && key > row + diagonal - window;
  }
};

// The tiles of kRows rows of the memory set, then of the recalled keys of all the rows' blocks.
//
// Shared memory holds for a tile, in one of kSlots slots, a code of the rows of the query tile that
// see each key.
template <int kRows, int kKeys, int kSlots>
struct GatheredKeys {
  static_assert(kRows <= 128);

  // 127 + first in the low byte, 127 - last in the high one: taking `row` from the low byte and
  // adding it to the high one sets the top bit of one unless first <= row <= last. No byte
  // overflows, so that one addition tests two codes.
  __device__ __forceinline__ static constexpr uint16_t code_of(int first, int last) {
    return static_cast<uint16_t>((127 - last) << 8 | (127 + first));
  }
  static constexpr uint16_t kAllRows = code_of(0, kRows - 1);
  static constexpr uint16_t kNoRow = code_of(127, 0);

  struct Lookup {
    int32_t position;
    int32_t visible_from;
  };

  // In shared memory, not in registers.
  struct Shared {
    alignas(4) uint16_t visible[kSlots][kKeys];
    int64_t memory;       // element of `indices` where the head's memory set begins
    int position;         // absolute, of the tile's first row
    int recall_end;       // of the pass's first row: keys from here on are not recalled
    int first_block;      // of the recall lists, counted over batch rows
    int first_block_row;  // where its rows begin, counted from the tile's first
    int blocks;           // that have rows of the tile
    int first_entry;
    int entries;  // of these blocks

    __device__ __forceinline__ bool has_none(int slot) const { return visible[slot][0] == kNoRow; }
    __device__ __forceinline__ bool has_all(int slot) const {
      return visible[slot][kKeys - 1] != kNoRow;
    }
    // The codes of keys r and r + 1; r is even.
    __device__ __forceinline__ uint32_t codes(int slot, int r) const {
      const uint16_t* const first = visible[slot] + r;
      return *reinterpret_cast<const uint32_t*>(first);
    }
    // What to add to codes, so that sees() tells whether the row sees key r + i.
    __device__ __forceinline__ static uint32_t test_of(int row) { return row * 0x00FF00FFU; }
    __device__ __forceinline__ static bool sees(uint32_t tested, int i) {
      return (tested >> 16 * i & 0x8080) == 0;
    }
  };

  const AttendForwardParams& p;
  Shared* const shared;
  int memory_tiles;
  int tiles;
  int first_slot;  // of tile 0; the others follow in turn

  // By the block's first kThreads threads, between barriers.
  __device__ __forceinline__ GatheredKeys(const AttendForwardParams& params, const RowTile& rows,
                                          Shared* shared)
      : p(params),
        shared(shared),
        memory_tiles(divide_up(static_cast<int>(params.memory.width), kKeys)),
        tiles(memory_tiles),
        first_slot(0) {
    Shared all;
    all.memory = (rows.batch * p.key.heads + rows.kv_head) * p.memory.width;
    all.position = rows.position;
    all.recall_end = static_cast<int>(p.rows.position());
    all.first_block = all.first_block_row = all.blocks = all.first_entry = all.entries = 0;
    if (p.recall.offsets) {
      const int block_rows = static_cast<int>(p.recall.block);
      const int first = rows.first / block_rows;
      all.first_block = rows.batch * static_cast<int>(p.recall.blocks) + first;
      all.first_block_row = first * block_rows - rows.first;
      all.blocks = (rows.first + rows.count - 1) / block_rows - first + 1;
      // Whatever the offsets are, nothing is read outside of the lists, and no loop waits for tiles
      // that nobody loads.
      const int entries = static_cast<int>(p.recall.entries);
      all.first_entry = min(max(p.recall.offsets[all.first_block], 0), entries);
      const int end = min(p.recall.offsets[all.first_block + all.blocks], entries);
      all.entries = max(end - all.first_entry, 0);
      tiles += divide_up(all.entries, kKeys);
    }
    if (threadIdx.x == 0) {
      shared->memory = all.memory;
      shared->position = all.position;
      shared->recall_end = all.recall_end;
      shared->first_block = all.first_block;
      shared->first_block_row = all.first_block_row;
      shared->blocks = all.blocks;
      shared->first_entry = all.first_entry;
      shared->entries = all.entries;
    }
  }

  __device__ __forceinline__ Lookup prepare(int j, int r) const {
    Lookup lookup{-1, 0};
    if (j < memory_tiles) {
      const int i = j * kKeys + r;
      if (i < p.memory.width) lookup.position = p.memory.positions[shared->memory + i];
    } else {
      const int i = (j - memory_tiles) * kKeys + r;
      if (i < shared->entries) {
        lookup.position = p.recall.positions[shared->first_entry + i];
        lookup.visible_from = p.recall.visible_from[shared->first_entry + i];
      }
    }
    return lookup;
  }

  __device__ __forceinline__ int resolve(int j, int r, const Lookup& lookup) const {
    uint16_t rows = kNoRow;
    if (tile::is_row_of(p.key, lookup.position))
      rows = j < memory_tiles ? kAllRows : rows_that_recall(j, r, lookup);
    shared->visible[slot_of(j)][r] = rows;
    return rows == kNoRow ? -1 : lookup.position;
  }

  // Whether the tile's last row, at position `last`, or one of an earlier block may see recalled
  // key i or a later one: a block's keys rise by the row from which they are seen.
  __device__ __forceinline__ bool is_seen_from(int i, int last) const {
    const int entry = shared->first_entry + i;
    return entry < p.recall.offsets[shared->first_block + shared->blocks - 1] ||
           p.recall.visible_from[entry] <= last;
  }

  __device__ __forceinline__ int slot_of(int j) const {
    return static_cast<uint32_t>(first_slot + j) % kSlots;
  }
  // Absent members of a memory set are its last ones.
  __device__ __forceinline__ bool fully_masked(int j, int /*w*/) const {
    return j < memory_tiles && shared->has_none(slot_of(j));
  }
  __device__ __forceinline__ bool unmasked(int j, int /*w*/) const {
    return j < memory_tiles && shared->has_all(slot_of(j));
  }
  __device__ __forceinline__ bool is_visible(int j, int r, int row) const {
    return Shared::sees(shared->visible[slot_of(j)][r] + Shared::test_of(row), 0);
  }

 private:
  __device__ __forceinline__ uint16_t rows_that_recall(int j, int r, const Lookup& lookup) const {
    if (lookup.position >= shared->recall_end || in_memory(lookup.position)) return kNoRow;
    const int i = (j - memory_tiles) * kKeys + r;
    const int block_rows = static_cast<int>(p.recall.block);
    const int begin = shared->first_block_row + block_of(shared->first_entry + i) * block_rows;
    const int first = max(lookup.visible_from - shared->position, max(begin, 0));
    const int last = min(begin + block_rows, kRows) - 1;
    return first <= last ? code_of(first, last) : kNoRow;
  }

  // The block, counted from the first one, whose list has entry i.
  __device__ __forceinline__ int block_of(int i) const {
    const int32_t* offsets = p.recall.offsets + shared->first_block;
    int low = 0, high = shared->blocks - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (offsets[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // As unsigned numbers, absent members are the highest: the whole list is ascending. All lanes
  // take equally many steps, which saves the instructions of branches that diverge.
  __device__ __forceinline__ bool in_memory(int32_t position) const {
    const int32_t* member = p.memory.positions + shared->memory;
    uint32_t count = min(static_cast<int>(p.memory.width), memory_tiles * kKeys);
    if (count == 0) return false;
    while (count > 1) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // the last ones may halve 1, which is in vain
        const int32_t* const middle = member + count / 2;
        if (static_cast<uint32_t>(*middle) <= static_cast<uint32_t>(position)) member = middle;
        count -= count / 2;
      }
    }
    return *member == position;
  }
};

// The same where any thread may load any row, so that shared memory holds these too.
template <int kRows, int kKeys>
struct ListedKeys : GatheredKeys<kRows, kKeys, 2> {
  using Keys = GatheredKeys<kRows, kKeys, 2>;
  static_assert(kKeys <= tile::kThreads);

  struct Shared : Keys::Shared {
    int32_t rows[2][kKeys];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  __device__ __forceinline__ ListedKeys(const AttendForwardParams& params, const RowTile& rows,
                                        void* shared_memory)
      : Keys(params, rows, static_cast<Shared*>(shared_memory)) {}

  // Resolves the keys of tile j, each by the thread that has looked it up.
  __device__ __forceinline__ void store(int j, const typename Keys::Lookup& lookup) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kKeys) return;
    rows_of(j)[thread] = Keys::resolve(j, thread, lookup);
  }
  __device__ __forceinline__ int row_of(int j, int r) const { return rows_of(j)[r]; }

 private:
  __device__ __forceinline__ int32_t* rows_of(int j) const {
    return static_cast<Shared*>(this->shared)->rows[j % 2];
  }
};

// A shape's keys of one kind.
template <typename Shape, KeyKind kKind>
using KeysOf =
    std::conditional_t<kKind == KeyKind::kGathered, typename Shape::Gathered,
                       std::conditional_t<kKind == KeyKind::kLimited, typename Shape::Limited,
                                          typename Shape::Causal>>;

}  // namespace h2o_prefill::attend
