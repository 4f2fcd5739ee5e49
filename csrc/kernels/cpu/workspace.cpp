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

int64_t Workspace::add_bytes(int64_t bytes) {
  const int64_t offset = bytes_;
  bytes_ += whole_lines<char>(bytes);
  return offset;
}

void Workspace::allocate() {
  Block& kept = kept_by_thread();
  if (kept.data && kept.bytes >= bytes_) {
    block_ = std::exchange(kept, {});
  } else {
    auto fresh = c10::GetCPUAllocator()->allocate(std::max<int64_t>(bytes_, 1));
    block_.data = static_cast<char*>(fresh.get());
    block_.bytes = bytes_;
    const auto free = fresh.get_deleter();
    block_.owner = {fresh.release_context(), free};
  }
  if (is_poisoned()) {
    std::fill_n(reinterpret_cast<float*>(block_.data), bytes_ / static_cast<int64_t>(sizeof(float)),
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
