// Work of an operator call, cut into tasks for the threads of PyTorch's pool.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/host_device.h"

namespace h2o_prefill {

// Multiply-adds below which waking other threads costs more than they save.
constexpr int64_t kSerialWork = 1 << 19;

// Tasks that each thread gets at least, where work can be cut finer, so that no thread waits long
// for the last one.
constexpr int64_t kTasksPerThread = 4;

// The tasks 0, 1, ..., tasks - 1.
struct TaskRange {
  int64_t tasks;

  int64_t count() const { return tasks; }
  int64_t at(int64_t i) const { return i; }
};

// Runs use(task, thread) for all tasks of a grid; threads take the next task as they become free.
// Each task writes only its own results, so they do not depend on the schedule.
template <typename Grid, typename Use>
void for_each_task(const Grid& grid, int64_t max_threads, const Use& use) {
  const int64_t count = grid.count();
  const int64_t threads = std::min(count, max_threads);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) use(grid.at(i), 0);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t i = next++; i < count; i = next++) use(grid.at(i), thread);
    }
  });
}

}  // namespace h2o_prefill
