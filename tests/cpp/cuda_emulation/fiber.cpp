#include "cuda_emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda_emulation/races.h"

#if defined(H2O_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a call preserves, stores the stack pointer, takes the other one.
extern "C" void cuda_emulation_switch_stack(void** from, void* to);
asm(R"(
.text
.globl cuda_emulation_switch_stack
.type cuda_emulation_switch_stack, @function
cuda_emulation_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulation_switch_stack, . - cuda_emulation_switch_stack
)");
#endif

namespace cuda_emulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

// The two sides of the latest switch.
Fiber* left = nullptr;
Fiber* entered = nullptr;

}  // namespace

Fiber::Fiber(void (*entry)())
    : entry_(entry), stack_size_(kStackBytes), of_sanitizer_(races::new_fiber()) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mapping_ = mmap(nullptr, page + stack_size_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED || mprotect(mapping_, page, PROT_NONE) != 0) {
    std::perror("cuda emulation: no memory for the stack of a thread");
    std::abort();
  }
  stack_ = static_cast<char*>(mapping_) + page;
#if defined(__x86_64__)
  // As if enter(), just called, had switched: six registers, its address to return to, and a return
  // address of enter() itself that nobody uses.
  auto* top = reinterpret_cast<uintptr_t*>(static_cast<char*>(stack_) + stack_size_);
  top[-1] = 0;
  top[-2] = reinterpret_cast<uintptr_t>(&Fiber::enter);
  for (int i = 3; i <= 8; ++i) top[-i] = 0;
  stack_pointer_ = top - 8;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_size_;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
#endif
}

Fiber::~Fiber() {
  if (mapping_)
    munmap(mapping_, static_cast<char*>(stack_) - static_cast<char*>(mapping_) + stack_size_);
}

void Fiber::enter() {
  entered->arrive();
  entered->entry_();
  std::abort();
}

// Tells the sanitizer that this stack is the one in use. The bounds of a stack that no fibre made
// are learned from the sanitizer when somebody comes from there.
void Fiber::arrive() {
#if defined(H2O_ADDRESS_SANITIZER)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
  if (!left->mapping_) {
    left->stack_ = const_cast<void*>(bottom);
    left->stack_size_ = size;
  }
#endif
}

void Fiber::switch_to(Fiber& next) {
  left = this;
  entered = &next;
  if (!of_sanitizer_) of_sanitizer_ = races::current_fiber();
#if defined(H2O_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.stack_size_);
#endif
  races::switch_to(next.of_sanitizer_);
#if defined(__x86_64__)
  cuda_emulation_switch_stack(&stack_pointer_, next.stack_pointer_);
#else
  swapcontext(&context_, &next.context_);
#endif
  arrive();
}

}  // namespace cuda_emulation
