// A stack of its own and the switch to it: threads that run one at a time, when they are told to.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define H2O_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define H2O_ADDRESS_SANITIZER 1
#endif
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {

class Fiber {
 public:
  // The fibre of the thread that runs already.
  Fiber() = default;
  // A fibre that will run entry(), which must not return. There is a page without access below its
  // stack.
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Stops this fibre, the one that runs, and goes on with `next`; returns when somebody switches
  // back.
  void switch_to(Fiber& next);

 private:
  static void enter();
  void arrive();

  void (*entry_)() = nullptr;
  void* mapping_ = nullptr;  // guard page and stack; null for the thread's own stack
  void* stack_ = nullptr;
  size_t stack_size_ = 0;
  void* of_sanitizer_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
#if defined(H2O_ADDRESS_SANITIZER)
  void* fake_stack_ = nullptr;
#endif
};

}  // namespace cuda_emulation
