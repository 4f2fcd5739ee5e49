#include "kernels/cpu/workspace.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace h2o_prefill {
namespace {

// Like torch.empty(), which can fill fresh tensors to expose uninitialized reads.
bool is_poisoned() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

}  // namespace

Workspace::Block& Workspace::spare_of_thread() {
  thread_local Block spare;
  return spare;
}

void Workspace::allocate() {
  Block& spare = spare_of_thread();
  if (spare.data && spare.bytes >= bytes_) {
    block_ = std::exchange(spare, {});
  } else {
    block_ = {c10::GetCPUAllocator()->allocate(std::max<int64_t>(bytes_, 1)), bytes_};
  }
  if (is_poisoned()) {
    std::fill_n(static_cast<float*>(block_.data.get()),
                bytes_ / static_cast<int64_t>(sizeof(float)),
                std::numeric_limits<float>::quiet_NaN());
  }
}

Workspace::~Workspace() {
  Block& spare = spare_of_thread();
  if (block_.data && block_.bytes <= kKeptBytes && block_.bytes > spare.bytes) {
    spare = std::move(block_);
  }
}

}  // namespace h2o_prefill
