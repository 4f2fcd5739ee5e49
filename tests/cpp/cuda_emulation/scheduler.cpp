#include "cuda_emulation/scheduler.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_emulation/copies.h"
#include "cuda_emulation/fiber.h"
#include "cuda_emulation/hopper.h"
#include "cuda_emulation/races.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cuda_emulation {
namespace {

struct Thread {
  explicit Thread(void (*entry)()) : fiber(entry) {}

  Fiber fiber;
  int index = 0;  // in its block
  uint3 position{};
  const char* waits_at = nullptr;   // null: it runs or can, or has ended
  Site site{};                      // where that is
  const void* waits_for = nullptr;  // of wait_for()
  Copies copies;
};

// Threads that meet at collectives.
struct Meeting {
  int arrived = 0;
  int times = 0;  // that all had come
  char orders[2];
  void* arguments[kWarpgroupSize];
};

struct Warp {
  std::vector<int> ready;  // threads that can go on
  Meeting lanes;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

constexpr uint32_t kSharedWindow = 128;

uint64_t seed = 0;
std::mt19937_64 engine;

// The grid.
const std::function<void()>* kernel = nullptr;
int block_size = 0;
std::vector<std::unique_ptr<Thread>> threads;  // at least block_size, used by block after block
std::vector<int> order;                        // of warps: who goes first
bool take_turns = false;

// The block.
std::unique_ptr<unsigned char, Free> shared;
size_t shared_size = 0;
std::vector<Warp> warps;
std::vector<Meeting> warpgroups;
int at_barrier = 0;
int barriers = 0;  // that all have passed
int ended = 0;
char block_begins, block_ends, barrier_orders[2];

Fiber host;
Thread* running = nullptr;

size_t below(size_t n) { return engine() % n; }

void report(const char* format, va_list arguments) {
  std::fprintf(stderr, "cuda emulation: block (%u, %u, %u), thread %d, seed %llu: ", blockIdx.x,
               blockIdx.y, blockIdx.z, running ? running->index : -1,
               static_cast<unsigned long long>(seed));
  std::vfprintf(stderr, format, arguments);
}

void make_ready(Thread& thread) {
  thread.waits_at = nullptr;
  thread.waits_for = nullptr;
  warps[thread.index / kWarpSize].ready.push_back(thread.index);
}

// Nobody can go on. Says who waits for whom. Not inline: the sanitizer would mark the places of the
// strings on the stack whenever a thread is chosen.
[[noreturn, gnu::noinline]] void report_stall() {
  std::string waits;
  for (int i = 0, begin = 0; i < block_size; ++i) {
    const Thread& thread = *threads[i];
    if (i + 1 < block_size) {
      const Thread& next = *threads[i + 1];
      const bool alike = next.waits_at == thread.waits_at;
      if (alike && (!thread.waits_at || next.site == thread.site)) continue;
    }
    waits += "\n  threads " + std::to_string(begin) + " to " + std::to_string(i);
    if (thread.waits_at) {
      waits += std::string(" wait at ") + thread.waits_at + ", " + thread.site.file + ":" +
               std::to_string(thread.site.line);
    } else {
      waits += " have ended";
    }
    begin = i + 1;
  }
  fail("nobody can go on:%s", waits.c_str());
}

// Who goes on.
Thread& choose() {
  const size_t first = take_turns ? below(warps.size()) : 0;
  for (size_t i = 0; i < warps.size(); ++i) {
    std::vector<int>& ready = warps[order[(first + i) % warps.size()]].ready;
    if (ready.empty()) continue;
    std::swap(ready[below(ready.size())], ready.back());
    const int index = ready.back();
    ready.pop_back();
    return *threads[index];
  }
  report_stall();
}

void resume(Fiber& from, Thread& next) {
  running = &next;
  threadIdx = next.position;
  if (&from != &next.fiber) from.switch_to(next.fiber);
}

// The running thread lets others go on until it is its turn again.
void yield() {
  Fiber& self = running->fiber;
  resume(self, choose());
}

void wait_at(const char* name, Site site) {
  running->waits_at = name;
  running->site = site;
}

// The running thread meets `size` threads, from thread `first` on.
void meet(const char* kind, Meeting& meeting, int first, int size, const char* name, void* argument,
          void (*execute)(void* const*), Site site) {
  wait_at(name, site);
  meeting.arguments[running->index - first] = argument;
  const char* const round = &meeting.orders[meeting.times % 2];
  races::release(round);
  if (++meeting.arrived == size) {
    for (int i = first; i < first + size; ++i) {
      const Thread& other = *threads[i];
      if (!(other.site == site) || other.waits_at != name) {
        fail("%s are apart: at %s (%s:%d) while thread %d is at %s (%s:%d)", kind, name, site.file,
             site.line, i, other.waits_at, other.site.file, other.site.line);
      }
    }
    meeting.arrived = 0;
    ++meeting.times;
    races::acquire(round);
    if (execute) execute(meeting.arguments);
    races::release(round);
    for (int i = first; i < first + size; ++i) make_ready(*threads[i]);
  }
  yield();
  races::acquire(round);
}

// The fibre of a thread: one kernel after the other.
void run_thread() {
  for (;;) {
    races::acquire(&block_begins);
    (*kernel)();
    races::release(&block_ends);
    running->copies.forget();
    hopper::end_thread();
    if (++ended == block_size) {
      running->fiber.switch_to(host);
    } else {
      yield();
    }
  }
}

void run_block(size_t shared_bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, shared_bytes) != 0) fail("no memory");
  std::memset(memory, 0xFF, shared_bytes);
  shared.reset(static_cast<unsigned char*>(memory));
  shared_size = shared_bytes;
  warps.assign(block_size / kWarpSize, Warp{});
  warpgroups.assign(block_size / kWarpgroupSize, Meeting{});
  hopper::begin_block(block_size);
  at_barrier = 0;
  ended = 0;
  std::shuffle(order.begin(), order.end(), engine);
  for (int i = 0; i < block_size; ++i) make_ready(*threads[i]);
  races::release(&block_begins);
  resume(host, choose());
  races::acquire(&block_ends);
  running = nullptr;
  hopper::end_block();
  shared.reset();
}

void position_threads(dim3 block) {
  block_size = static_cast<int>(block.x * block.y * block.z);
  if (block_size % kWarpSize != 0) fail("%d threads are not whole warps", block_size);
  for (int i = 0; i < block_size; ++i) {
    if (i == static_cast<int>(threads.size())) {
      threads.push_back(std::make_unique<Thread>(&run_thread));
    }
    const auto linear = static_cast<unsigned int>(i);
    threads[i]->index = i;
    threads[i]->position = {linear % block.x, linear / block.x % block.y,
                            linear / block.x / block.y};
  }
  order.resize(block_size / kWarpSize);
  std::iota(order.begin(), order.end(), 0);
}

}  // namespace

void set_seed(uint64_t value) { seed = value; }

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  engine.seed(seed);
  take_turns = seed % 2 != 0;
  kernel = &body;
  blockDim = block;
  gridDim = grid;
  position_threads(block);
  std::vector<uint64_t> blocks(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), uint64_t{0});
  std::shuffle(blocks.begin(), blocks.end(), engine);
  for (const uint64_t linear : blocks) {
    blockIdx = {static_cast<unsigned int>(linear % grid.x),
                static_cast<unsigned int>(linear / grid.x % grid.y),
                static_cast<unsigned int>(linear / grid.x / grid.y)};
    run_block(shared_bytes);
  }
}

void* shared_memory() { return shared.get(); }

int thread_index() { return running->index; }

void block_barrier(Site site) {
  wait_at("__syncthreads", site);
  const char* const round = &barrier_orders[barriers % 2];
  races::release(round);
  if (++at_barrier == block_size) {
    ++barriers;
    for (int i = 0; i < block_size; ++i) {
      const Site& other = threads[i]->site;
      if (!(other == site)) {
        fail("at the __syncthreads of %s:%d while thread %d is at the one of %s:%d", site.file,
             site.line, i, other.file, other.line);
      }
    }
    at_barrier = 0;
    std::shuffle(order.begin(), order.end(), engine);
    for (int i = 0; i < block_size; ++i) make_ready(*threads[i]);
  }
  yield();
  races::acquire(round);
}

void warp_collective(const char* name, void* argument, void (*execute)(void* const*), Site site) {
  const int warp = running->index / kWarpSize;
  meet("lanes of a warp", warps[warp].lanes, warp * kWarpSize, kWarpSize, name, argument, execute,
       site);
}

void warpgroup_collective(const char* name, void* argument, void (*execute)(void* const*),
                          Site site) {
  const int group = running->index / kWarpgroupSize;
  if (group >= static_cast<int>(warpgroups.size())) {
    fail_at(site, "%s by warps that are no whole warpgroup", name);
  }
  meet("warps of a warpgroup", warpgroups[group], group * kWarpgroupSize, kWarpgroupSize, name,
       argument, execute, site);
}

void wait_for(const char* name, const void* what, Site site) {
  wait_at(name, site);
  running->waits_for = what;
  yield();
}

void wake(const void* what) {
  for (int i = 0; i < block_size; ++i) {
    if (threads[i]->waits_for == what) make_ready(*threads[i]);
  }
}

Copies& copies() { return running->copies; }

void check_alignment(const char* name, const void* address, size_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  fail_at(site, "%s at an address that is not a multiple of %zu", name, bytes);
}

void check_shared(const char* name, const void* address, size_t bytes, Site site) {
  check_alignment(name, address, bytes, site);
  const auto offset = static_cast<std::ptrdiff_t>(reinterpret_cast<uintptr_t>(address) -
                                                  reinterpret_cast<uintptr_t>(shared.get()));
  if (offset >= 0 && offset + bytes <= shared_size) return;
  fail_at(site, "%s at offset %td of %zu bytes of shared memory", name, offset, shared_size);
}

uint32_t shared_address(const void* address) {
  return kSharedWindow + static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) -
                                               reinterpret_cast<uintptr_t>(shared.get()));
}

unsigned char* at_shared_address(const char* name, uint32_t address, size_t bytes, Site site) {
  const int64_t offset = int64_t{address} - kSharedWindow;
  if (offset < 0 || offset + bytes > shared_size) {
    fail_at(site, "%s at offset %lld of %zu bytes of shared memory", name,
            static_cast<long long>(offset), shared_size);
  }
  return shared.get() + offset;
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  std::fputc('\n', stderr);
  std::abort();
}

void fail_at(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  std::fprintf(stderr, " (%s:%d)\n", site.file, site.line);
  std::abort();
}

}  // namespace cuda_emulation
