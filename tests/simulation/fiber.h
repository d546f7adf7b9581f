// The stack and the thread-local variables of a thread, for use by another thread of the kernel.
//
//   void* Body(void*) {              // On a new thread:
//     LendFiber(fiber);              // waits in the kernel, while ...
//     ...                            // ... this code runs on the thread that switches to it.
//   }
//   AwaitLent(fiber);                // On the thread that runs all fibers:
//   SwitchFiber(own, fiber);         // runs it until it switches back
//   ReturnFiber(fiber);              // its thread continues where the fiber switched away
//
// A switch takes a tenth of a microsecond, where waking another thread takes fifteen;
// pthread_self() and thread-local variables are those of the fiber. x86-64 only.

#ifndef EVENKEEL_TESTS_SIMULATION_FIBER_H_
#define EVENKEEL_TESTS_SIMULATION_FIBER_H_

#include <atomic>
#include <cstdint>

namespace evenkeel::simulation {

// The assembly code in fiber.cc uses this layout.
struct Fiber {
  void* stack = nullptr;        // Its top, with the saved registers.
  uint64_t thread_pointer = 0;  // The address of the thread-local variables.
  std::atomic<uint32_t> is_lent = 0, is_returned = 0;
};

// Sets the thread pointer to that of the calling thread, which will only switch.
void InitFiber(Fiber& fiber);
// Returns first on the thread that switches to the fiber, and a second time on the thread itself.
void LendFiber(Fiber& fiber);
void AwaitLent(Fiber& fiber);
void SwitchFiber(Fiber& from, Fiber& to);
void ReturnFiber(Fiber& fiber);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_FIBER_H_
