// The asynchronous copies of one thread, in groups as cp.async has them.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "cuda_emulation/races.h"

namespace cuda_emulation {

class Copies {
 public:
  // The destination is 0xFF until a wait has finished the group, and the source is read then;
  // without a source zeros are written.
  void begin(void* to, const void* from, size_t bytes) {
    // Read now too, so that a report of the sanitizer names the line of the kernel.
    const auto* now = static_cast<const volatile unsigned char*>(from);
    for (size_t i = 0; from && i < bytes; ++i) static_cast<void>(now[i]);
    if (from) races::read(from, bytes);
    races::write(to, bytes);
    std::memset(to, 0xFF, bytes);
    open_.push_back({to, from, bytes});
  }

  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }

  void wait(int pending) {
    for (; static_cast<int>(groups_.size()) > pending; groups_.pop_front()) {
      for (const Copy& copy : groups_.front()) copy.finish();
    }
  }

  struct Copy {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;

    void finish() const {
      races::write(to, bytes);
      if (from) {
        std::memcpy(to, from, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  };

  // All that are not finished, which are somebody else's from now on.
  std::vector<Copy> take() {
    commit();
    std::vector<Copy> all;
    for (const std::vector<Copy>& group : groups_) {
      all.insert(all.end(), group.begin(), group.end());
    }
    groups_.clear();
    return all;
  }

  void forget() {
    open_.clear();
    groups_.clear();
  }

 private:
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;  // committed, not finished
};

}  // namespace cuda_emulation
