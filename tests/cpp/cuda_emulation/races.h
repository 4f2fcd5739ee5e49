// Tells ThreadSanitizer, where the tests are built with it, that emulated threads are fibers and
// that their waits order their accesses. Nothing happens elsewhere.
//
// An object that orders is used for one round of arrivals and then for the next but one: a thread
// that leaves late must not be ordered after arrivals of the next round.
#pragma once

#include <cstddef>

#if defined(H2O_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
extern "C" void __tsan_write_range(void* address, unsigned long bytes);
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace cuda_emulation::races {

#if defined(H2O_THREAD_SANITIZER)

// Accesses of the running thread before release() come before a thread's accesses after acquire().
inline void release(const void* order) { __tsan_release(const_cast<void*>(order)); }
inline void acquire(const void* order) { __tsan_acquire(const_cast<void*>(order)); }

// Accesses of the running thread that the emulation makes for it.
inline void read(const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
}
inline void write(void* to, size_t bytes) { __tsan_write_range(to, bytes); }

// While it lives, the running thread keeps books of the emulation, which no kernel has.
struct Unseen {
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_to(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}

#else

inline void release(const void*) {}
inline void acquire(const void*) {}
inline void read(const void*, size_t) {}
inline void write(void*, size_t) {}
struct Unseen {
  Unseen() {}
};
inline void* new_fiber() { return nullptr; }
inline void* current_fiber() { return nullptr; }
inline void switch_to(void*) {}

#endif

}  // namespace cuda_emulation::races
