#include "evenkeel/tests/simulation/fiber.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>

#include <cstddef>

namespace evenkeel::simulation {
namespace {

static_assert(offsetof(Fiber, stack) == 0 && offsetof(Fiber, thread_pointer) == 8);
static_assert(offsetof(Fiber, is_lent) == 16 && offsetof(Fiber, is_returned) == 20);

// The original function; libc.cc defines another one.
long Futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static const auto original = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return original(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

}  // namespace

extern "C" {
void EvenkeelSwitchFiber(Fiber* from, Fiber* to);
void EvenkeelLendFiber(Fiber* fiber);
}

// The registers that a callee preserves are on the stack. arch_prctl(ARCH_SET_FS) changes the
// thread pointer; the instruction wrfsbase is not allowed everywhere.
asm(R"(
.macro saveRegisters
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
.endm
.macro restoreRegisters
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
.endm
.pushsection .text
.type EvenkeelSwitchFiber, @function
EvenkeelSwitchFiber:
    saveRegisters
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    movq 8(%rsi), %rsi
    movl $0x1002, %edi
    movl $158, %eax
    syscall
    restoreRegisters
    ret
.size EvenkeelSwitchFiber, . - EvenkeelSwitchFiber
)"
    // Once is_lent is 1 another thread may use this stack, so from then on the code uses registers
    // only: futex(&is_lent, FUTEX_WAKE_PRIVATE, 1), then futex(&is_returned, FUTEX_WAIT_PRIVATE, 0)
    // until is_returned is 1.
    R"(
.type EvenkeelLendFiber, @function
EvenkeelLendFiber:
    saveRegisters
    movq %rdi, %rbx
    movq %rsp, (%rbx)
    movl $1, 16(%rbx)
    leaq 16(%rbx), %rdi
    movl $129, %esi
    movl $1, %edx
    movl $202, %eax
    syscall
1:  cmpl $0, 20(%rbx)
    jne 2f
    leaq 20(%rbx), %rdi
    movl $128, %esi
    xorl %edx, %edx
    xorl %r10d, %r10d
    movl $202, %eax
    syscall
    jmp 1b
2:  movq (%rbx), %rsp
    restoreRegisters
    ret
.size EvenkeelLendFiber, . - EvenkeelLendFiber
.popsection
)");

void InitFiber(Fiber& fiber) { fiber.thread_pointer = reinterpret_cast<uint64_t>(pthread_self()); }

void LendFiber(Fiber& fiber) {
  InitFiber(fiber);
  EvenkeelLendFiber(&fiber);
}

void AwaitLent(Fiber& fiber) {
  while (fiber.is_lent.load(std::memory_order_acquire) == 0)
    Futex(fiber.is_lent, FUTEX_WAIT_PRIVATE, 0);
}

void SwitchFiber(Fiber& from, Fiber& to) { EvenkeelSwitchFiber(&from, &to); }

void ReturnFiber(Fiber& fiber) {
  fiber.is_returned.store(1, std::memory_order_release);
  Futex(fiber.is_returned, FUTEX_WAKE_PRIVATE, 1);
}

}  // namespace evenkeel::simulation
