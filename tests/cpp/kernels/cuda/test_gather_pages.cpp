// Rows out of pages, whatever the order of pages, heads and rows in memory, to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cuda/gather_pages.h"

namespace h2o_prefill::testing {
namespace {

struct alignas(16) Unit {
  double first, last;
};

void gather(int64_t page_size, int64_t units, const std::array<int, 3>& order) {
  constexpr int64_t kPages = 5, kHeads = 3;
  const std::array<int64_t, 3> sizes{kPages, kHeads, page_size};
  std::array<int64_t, 3> strides{};
  int64_t stride = units;
  for (const int dim : order) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  std::vector<Unit> pages(stride);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = {static_cast<double>(i), 1};
  const std::vector<int32_t> table{3, 0, kPages, 4, -1, 3};
  const int64_t total = std::ssize(table) * page_size - page_size / 2;
  std::vector<Unit> out(kHeads * total * units, {-7, -7});
  const GatherPagesParams params{.pages = pages.data(),
                                 .num_pages = kPages,
                                 .page_size = page_size,
                                 .stride_page = strides[0],
                                 .stride_head = strides[1],
                                 .stride_row = strides[2],
                                 .table = table.data(),
                                 .out = out.data(),
                                 .heads = kHeads,
                                 .total = total,
                                 .row_units = units};
  ASSERT_EQ(launch_gather_pages(params, nullptr), cudaSuccess);
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    const int64_t unit = i % units, t = i / units % total, head = i / units / total;
    const int64_t page = table[t / page_size], row = t % page_size;
    const bool is_there = page >= 0 && page < kPages;
    const int64_t at = page * strides[0] + head * strides[1] + row * strides[2] + unit;
    ASSERT_EQ(out[i].first, is_there ? static_cast<double>(at) : 0) << i;
    ASSERT_EQ(out[i].last, is_there ? 1 : 0) << i;
  }
}

TEST(GatherPages, AnyOrder) {
  std::array<int, 3> order{0, 1, 2};
  do {
    for (const int64_t page_size : {1, 16, 40}) {
      for (const int64_t units : {1, 8, 10, kGatherThreads}) gather(page_size, units, order);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace
}  // namespace h2o_prefill::testing
