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

Workspace::Block& Workspace::kept_by_thread() {
  thread_local Block kept;
  return kept;
}

void Workspace::allocate() {
  Block& kept = kept_by_thread();
  if (kept.data && kept.bytes >= bytes_) {
    block_ = std::exchange(kept, {});
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
  Block& kept = kept_by_thread();
  if (block_.data && block_.bytes <= kKeptBytes && block_.bytes > kept.bytes) {
    kept = std::move(block_);
  }
}

}  // namespace h2o_prefill
