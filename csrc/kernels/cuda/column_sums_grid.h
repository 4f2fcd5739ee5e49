// How a launch of column sums is divided among blocks: the same for all its kernels, but for the
// sizes of their tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/column_sums.h"

namespace h2o_prefill::column_sums {

// Keys that the launch has sums for.
inline int64_t columns_of(const ColumnSumsParams& p) {
  return p.gathered ? p.memory.width : p.rows.count;
}

// The launch computes this once for all blocks. A block works on key tile `tile` of a chunk (a
// memory set is one chunk) for some query heads of a KV head and some rows of the chunk: all of
// them, or one head and split_rows rows. Where blocks share tiles, and of memory sets always, their
// sums go to params.partial, [units, head_parts, row_parts, columns]. Blocks are numbered so that
// the key tiles of a chunk that the most rows see go first.
struct Grid {
  ColumnSumsParams params = {};
  uint32_t units = 0;       // batch rows times KV heads
  uint32_t group = 0;       // query heads of a KV head
  uint32_t head_parts = 0;  // blocks that share the group: 1 or `group`
  uint32_t row_parts = 0;   // blocks that share the rows
  uint32_t chunks = 0;
  uint32_t tiles = 0;
  int split_rows = 0;

  int64_t blocks() const { return parts() * chunks * tiles; }
  int64_t parts() const { return int64_t{units} * head_parts * row_parts; }
  H2O_HOST_DEVICE bool has_parts() const { return params.gathered || head_parts * row_parts > 1; }
  // Floats of workspace.
  int64_t partial_floats() const { return has_parts() ? parts() * columns_of(params) : 0; }
};

// Tile sizes of a kernel.
struct TileSizes {
  int64_t keys;
  int64_t rows;
  // Blocks that fill the GPUs that it is for. With fewer, the query heads and rows of a key tile
  // are shared out.
  int64_t many_blocks;
  // If not 0: its blocks take equal numbers of parts of memory sets, one query head and so many
  // rows each, or more where there would be more than kMaxRowParts.
  int64_t part_rows = 0;
};
constexpr int64_t kMaxRowParts = 8;

// An empty grid where there is nothing to sum.
inline Grid divide(const ColumnSumsParams& p, const TileSizes& sizes, bool may_share) {
  const int64_t columns = columns_of(p);
  if (p.query.batch == 0 || p.query.heads == 0 || p.key.heads == 0 || columns == 0)
    return {.params = p};
  const int64_t chunk =
      !p.gathered && p.causal.chunk_size < columns ? p.causal.chunk_size : columns;
  Grid grid{.params = p,
            .units = static_cast<uint32_t>(p.key.batch * p.key.heads),
            .group = static_cast<uint32_t>(p.query.heads / p.key.heads),
            .head_parts = 1,
            .row_parts = 1,
            .chunks = static_cast<uint32_t>(divide_up(columns, chunk)),
            .tiles = static_cast<uint32_t>(divide_up(chunk, sizes.keys)),
            .split_rows = static_cast<int>(p.rows.count)};
  if (p.gathered && sizes.part_rows > 0) {
    const int64_t least = divide_up(divide_up(p.rows.count, kMaxRowParts), sizes.rows) * sizes.rows;
    const int64_t rows = least > sizes.part_rows ? least : sizes.part_rows;
    grid.head_parts = grid.group;
    grid.row_parts = static_cast<uint32_t>(divide_up(p.rows.count, rows));
    grid.split_rows = static_cast<int>(rows);
    return grid;
  }
  // Tiles without members end at once.
  const bool is_wide = p.gathered && p.usual_width > 0 && p.usual_width < columns;
  const int64_t filled = is_wide ? divide_up(p.usual_width, sizes.keys) : grid.tiles;
  const int64_t blocks = grid.units * grid.chunks * filled;
  if (!may_share || blocks >= sizes.many_blocks) return grid;
  grid.head_parts = grid.group;
  // As many parts of the rows as end first, where blocks take turns and each begins with its keys,
  // which take about as long as a tile of rows.
  const int64_t row_tiles = divide_up(p.rows.count, sizes.rows);
  int64_t shortest = INT64_MAX;
  for (int64_t wanted = 1; p.gathered && wanted <= row_tiles; ++wanted) {
    const int64_t tiles_of_part = divide_up(row_tiles, wanted);
    const int64_t parts = divide_up(row_tiles, tiles_of_part);
    const int64_t turns = divide_up(blocks * grid.head_parts * parts, sizes.many_blocks);
    if (turns * (tiles_of_part + 1) >= shortest) continue;
    shortest = turns * (tiles_of_part + 1);
    grid.row_parts = static_cast<uint32_t>(parts);
    grid.split_rows = static_cast<int>(tiles_of_part * sizes.rows);
  }
  return grid;
}

}  // namespace h2o_prefill::column_sums
