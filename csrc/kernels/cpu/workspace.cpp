#include "kernels/cpu/workspace.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <limits>

namespace h2o_prefill {
namespace {

// What a thread keeps between calls.
struct Kept {
  at::DataPtr block;
  int64_t bytes = 0;
};

Kept& kept() {
  thread_local Kept of_this_thread;
  return of_this_thread;
}

// As torch.empty() fills fresh tensors for whoever looks for reads of what nothing wrote.
bool is_poisoned() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

}  // namespace

int64_t Workspace::add_bytes(int64_t bytes) {
  const int64_t offset = bytes_;
  bytes_ += whole_lines<char>(bytes);
  return offset;
}

void Workspace::allocate() {
  Kept& mine = kept();
  if (mine.block && mine.bytes >= bytes_) {
    block_ = std::move(mine.block);
    block_bytes_ = mine.bytes;
    mine = {};
  } else {
    block_ = c10::GetCPUAllocator()->allocate(std::max<int64_t>(bytes_, 1));
    block_bytes_ = bytes_;
  }
  if (is_poisoned()) {
    std::fill_n(static_cast<float*>(block_.get()), bytes_ / static_cast<int64_t>(sizeof(float)),
                std::numeric_limits<float>::quiet_NaN());
  }
}

Workspace::~Workspace() {
  Kept& mine = kept();
  if (block_ && block_bytes_ <= kKeptBytes && block_bytes_ > mine.bytes) {
    mine.block = std::move(block_);
    mine.bytes = block_bytes_;
  }
}

}  // namespace h2o_prefill
