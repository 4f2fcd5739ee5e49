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
  const std::array<int64_t, 3> sizes{5, 3, page_size};  // pages, heads, rows
  std::vector<int32_t> table{3, 0, 5, 4, -1, 3};
  GatherPagesParams p{};
  p.num_pages = 5, p.page_size = page_size, p.table = table.data(), p.heads = 3;
  int64_t stride = p.row_units = units;
  for (const int dim : order) {
    p.strides[dim] = stride;
    stride *= sizes[dim];
  }
  std::vector<Unit> pages(stride);
  for (int64_t i = 0; i < stride; ++i) pages[i] = {static_cast<double>(i), 1};
  p.pages = pages.data();
  p.total = std::ssize(table) * page_size - page_size / 2;
  std::vector<Unit> out(p.heads * p.total * units, {-7, -7});
  p.out = out.data();
  ASSERT_EQ(launch_gather_pages(p, nullptr), cudaSuccess);
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    const int64_t t = i / units % p.total, head = i / units / p.total, page = table[t / page_size];
    const int64_t from = page * p.strides[0] + head * p.strides[1] + t % page_size * p.strides[2];
    const Unit expected = page >= 0 && page < 5 ? pages[from + i % units] : Unit{};
    ASSERT_TRUE(out[i].first == expected.first && out[i].last == expected.last) << i;
  }
}

TEST(GatherPages, AnyOrder) {
  std::array<int, 3> order{0, 1, 2};
  do {
    for (const int64_t page_size : {1, 16, 40}) {
      for (const int64_t units : {1, 10, kGatherThreads}) gather(page_size, units, order);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace
}  // namespace h2o_prefill::testing
