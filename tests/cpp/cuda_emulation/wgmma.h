// Matrix products under way, and the registers that they will write.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "cuda_emulation/hopper.h"
#include "cuda_emulation/scheduler.h"

namespace cuda_emulation::hopper {

constexpr int kProductRows = 64;
constexpr int kProductDepth = 16;

// A product that a warpgroup has issued: operands as they were then.
struct Product {
  Operands operands;  // of the first thread
  Site site;
  std::vector<uint16_t> a_elements;  // [64, 16]
  std::vector<uint16_t> b_elements;  // [columns, 16]
  std::vector<double> values;        // [64, columns]
  int checked_warp = -1;             // that the operands were compared for last
};

// One thread's part of products.
class WarpgroupThread {
 public:
  using Registers = std::array<uint32_t, 4>;

  bool is_fenced = false;          // wgmma_fence() since the last wait
  bool needs_proxy_fence = false;  // has waited for copies and not yet fenced them

  bool is_waiting() const { return !accumulators_.empty(); }
  bool is_under_way(const float* c) const { return accumulators_.count(c) != 0; }

  void fence_operand(const uint32_t (&a)[4], Site site);
  bool is_operand_fenced(const uint32_t* a) const;
  void add(std::shared_ptr<Product> product, const uint32_t* a_registers, float* c, bool add);
  void commit();
  // Finishes all but the latest groups. thread: of the warpgroup.
  void wait(int pending, int thread, Site site);

 private:
  struct Part {
    std::shared_ptr<Product> product;
    const uint32_t* a_registers;
    Registers a;  // what they held
    float* c;
    bool add;
  };
  // What an accumulator will be.
  struct Accumulator {
    std::vector<float> values;
    int parts = 0;  // not finished
  };

  void finish(const Part& part, int thread, Site site);

  std::map<const float*, Accumulator> accumulators_;
  std::map<const uint32_t*, Registers> fenced_operands_;    // what they held at the fence
  std::map<const uint32_t*, Registers> finished_operands_;  // waited for, and not yet fenced
  std::vector<Part> open_;
  std::deque<std::vector<Part>> groups_;
};

// The argument of a thread to the collectives below.
struct Issue {
  WarpgroupThread* thread;
  const char* name;
  Operands operands;
  float* c;
  bool add;
  Site site;
};

struct Wait {
  WarpgroupThread* thread;
  int pending;
  Site site;
};

void issue_product(void* const* arguments);      // of a warpgroup
void wait_for_products(void* const* arguments);  // of a warp

}  // namespace cuda_emulation::hopper
