// The temporaries of one operator call: typed parts of one block of memory.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <type_traits>

namespace h2o_prefill {

// Parts are added first, then allocated together. A thread keeps the block of its last call for the
// next one, up to kKeptBytes, since the first touch of fresh memory costs more than what small
// calls compute; larger ones, and ones of a call inside a call, come from PyTorch's allocator.
class Workspace {
 public:
#if defined(__SANITIZE_ADDRESS__)
  // Accesses past a part's last element must be detected.
  static constexpr int64_t kKeptBytes = 0;
#else
  static constexpr int64_t kKeptBytes = int64_t{128} << 20;
#endif

  // Elements of type T from the beginning of a cache line on.
  template <typename T>
  struct Part {
    static_assert(std::is_trivially_default_constructible_v<T>);
    int64_t offset = 0;  // in bytes
  };

  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  // Plans `count` uninitialised elements.
  template <typename T>
  Part<T> add(int64_t count) {
    const int64_t offset = bytes_;
    bytes_ += whole_lines<char>(count * static_cast<int64_t>(sizeof(T)));
    return {offset};
  }

  // A multiple of a cache line that has room for `count` elements, so that parts of a part begin on
  // one too.
  template <typename T>
  static constexpr int64_t whole_lines(int64_t count) {
    constexpr int64_t kElements = kCacheLine / static_cast<int64_t>(sizeof(T));
    return (count + kElements - 1) / kElements * kElements;
  }

  void allocate();

  template <typename T>
  T* get(const Part<T>& part) const {
    return reinterpret_cast<T*>(static_cast<char*>(block_.data.get()) + part.offset);
  }

 private:
  static constexpr int64_t kCacheLine = 64;

  struct Block {
    c10::DataPtr data;
    int64_t bytes = 0;
  };

  static Block& spare_of_thread();

  int64_t bytes_ = 0;  // of all parts
  Block block_;
};

}  // namespace h2o_prefill
