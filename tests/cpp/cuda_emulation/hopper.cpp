#include "cuda_emulation/hopper.h"

#include <map>
#include <vector>

#include "cuda_emulation/races.h"
#include "cuda_emulation/scheduler.h"
#include "cuda_emulation/wgmma.h"

namespace cuda_emulation::hopper {
namespace {

constexpr uint16_t kMagic = 0xBA44;
constexpr int kNamedBarriers = 16;

// The 8 bytes of an mbarrier.
struct Mbarrier {
  uint16_t magic;
  uint16_t phase;  // that it is in
  uint16_t count;
  uint16_t missing;  // arrivals
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t));

struct NamedBarrier {
  int threads = 0;
  int arrived = 0;
  int times = 0;  // that it was complete
  char orders[2];
};

// The copies that arrivals brought, and whether the phase that ended last had any.
struct Cargo {
  std::vector<Copies::Copy> copies;
  bool landed = false;
};

std::map<const void*, Cargo> cargos;
NamedBarrier named[kNamedBarriers];
std::vector<WarpgroupThread> states;

WarpgroupThread& state() { return states[thread_index()]; }

Mbarrier load(const uint64_t* address, Site site) {
  check_shared("an mbarrier", address, sizeof(uint64_t), site);
  Mbarrier barrier;
  std::memcpy(&barrier, address, sizeof(barrier));
  if (barrier.magic == kMagic) return barrier;
  fail_at(site, "an mbarrier that was not initialised, or overwritten");
}

void store(uint64_t* address, const Mbarrier& barrier) {
  std::memcpy(address, &barrier, sizeof(barrier));
}

void named_barrier(const char* name, int number, int threads, bool wait, Site site) {
  if (number < 1 || number >= kNamedBarriers || threads % kWarpSize != 0) {
    fail_at(site, "%s with barrier %d, %d threads", name, number, threads);
  }
  NamedBarrier& barrier = named[number];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) {
    fail_at(site, "%s of %d threads while others make it %d", name, threads, barrier.threads);
  }
  const char* const order = &barrier.orders[barrier.times % 2];
  races::release(order);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.times;
    wake(&barrier);
  } else if (wait) {
    const int times = barrier.times;
    while (barrier.times == times) wait_for(name, &barrier, site);
  }
  if (wait) races::acquire(order);
}

// The order of a phase of an mbarrier, by its parity.
const void* order_of(const uint64_t* address, uint32_t phase) {
  return reinterpret_cast<const char*>(address) + 4 * (phase % 2);
}

}  // namespace

void begin_block(int threads) {
  cargos.clear();
  for (NamedBarrier& barrier : named) barrier = {};
  states.assign(threads, WarpgroupThread{});
}

void end_thread() {
  if (state().is_waiting()) fail("a thread ends before it has waited for its wgmma instructions");
}

void end_block() {
  for (int i = 0; i < kNamedBarriers; ++i) {
    if (named[i].arrived) fail("named barrier %d is left with %d threads", i, named[i].arrived);
  }
}

void mbarrier_init(uint64_t* barrier, uint32_t count, Site site) {
  check_shared("mbarrier_init", barrier, sizeof(uint64_t), site);
  const auto arrivals = static_cast<uint16_t>(count);
  store(barrier, {kMagic, 0, arrivals, arrivals});
}

void cp_async_mbarrier_arrive(uint64_t* address, Site site) {
  {
    const races::Unseen unseen;
    for (const Copies::Copy& copy : copies().take()) cargos[address].copies.push_back(copy);
  }
  mbarrier_arrive(address, site);
}

void mbarrier_arrive(uint64_t* address, Site site) {
  Mbarrier barrier = load(address, site);
  Cargo& cargo = cargos[address];
  races::release(order_of(address, barrier.phase));
  if (--barrier.missing > 0) {
    store(address, barrier);
    return;
  }
  races::acquire(order_of(address, barrier.phase));
  for (const Copies::Copy& copy : cargo.copies) copy.finish();
  races::release(order_of(address, barrier.phase));
  cargo.landed = !cargo.copies.empty();
  cargo.copies.clear();
  store(address, {kMagic, ++barrier.phase, barrier.count, barrier.count});
  wake(address);
}

bool mbarrier_try_wait(uint64_t* address, uint32_t parity, Site site) {
  if (load(address, site).phase % 2 == parity) return false;
  if (cargos[address].landed) state().needs_proxy_fence = true;
  races::acquire(order_of(address, parity));
  return true;
}

void mbarrier_wait(uint64_t* address, uint32_t parity, Site site) {
  while (!mbarrier_try_wait(address, parity, site)) wait_for("mbarrier_wait", address, site);
}

void named_barrier_sync(int number, int threads, Site site) {
  named_barrier("named_barrier_sync", number, threads, /*wait=*/true, site);
}

void named_barrier_arrive(int number, int threads, Site site) {
  named_barrier("named_barrier_arrive", number, threads, /*wait=*/false, site);
}

void fence_async_proxy() { state().needs_proxy_fence = false; }

void wgmma_fence() { state().is_fenced = true; }

void fence_operand(const uint32_t (&a)[4], Site site) { state().fence_operand(a, site); }

void wgmma(const char* name, const Operands& operands, float* c, bool add, Site site) {
  Issue issue{&state(), name, operands, c, add, site};
  warpgroup_collective(name, &issue, issue_product, site);
}

void wgmma_commit() { state().commit(); }

void wgmma_wait(int pending, Site site) {
  Wait wait{&state(), pending, site};
  warp_collective("wgmma_wait", &wait, wait_for_products, site);
}

}  // namespace cuda_emulation::hopper
