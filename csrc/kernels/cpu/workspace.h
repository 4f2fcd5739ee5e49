// The temporaries of one operator call: typed parts of one block of memory.
#pragma once

#include <cstdint>
#include <memory>
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
  static constexpr int64_t kKeptBytes = int64_t{64} << 20;
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
    return {add_bytes(count * static_cast<int64_t>(sizeof(T)))};
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
    return reinterpret_cast<T*>(block_.data + part.offset);
  }

 private:
  static constexpr int64_t kCacheLine = 64;

  int64_t add_bytes(int64_t bytes);

  // Memory of PyTorch's allocator.
  struct Block {
    char* data = nullptr;
    int64_t bytes = 0;
    std::unique_ptr<void, void (*)(void*)> owner{nullptr, nullptr};
  };

  static Block& kept_by_thread();

  int64_t bytes_ = 0;  // of all parts
  Block block_;
};

}  // namespace h2o_prefill
