// A block whose threads wait for each other: each runs on a stack of its own (ucontext) until it
// comes to WaitForBlock(); once all have come there, each goes on, in the order of their numbers.

#include "evenkeel/comm/device/kernel_on_host.h"

#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "evenkeel/comm/base/float16.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/runtime.h"

// swapcontext() asks the kernel for the mask of signals each time, which takes longer than all
// else. A stack that has been entered once is left and entered by jumps. AddressSanitizer is told
// of contexts only. ThreadSanitizer is told of nothing: to it a block is one thread of the host,
// which it is, and only the callers in its reports are of any fiber. Its own fibers cost a thousand
// times as much, and no process may have more than some thousand of them.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    (defined(__x86_64__) || defined(__aarch64__))
#define EK_FIBERS_JUMP 1
#else
#define EK_FIBERS_JUMP 0
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace evenkeel::internal {
namespace {

constexpr int kMostThreads = 1024;
constexpr size_t kStackBytes = size_t{128} << 10;  // Sanitizers make frames larger.

// One thread of a block, on its own stack.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack;
  bool is_done = false;
#if EK_FIBERS_JUMP
  bool is_entered = false;
  void* place[5];  // For __builtin_setjmp.
#endif
};

// The block that this thread of the host runs.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<double> mailboxes = std::vector<double>(kMostThreads);
  ucontext_t scheduler;
#if EK_FIBERS_JUMP
  void* scheduler_place[5];
#endif
  int current = 0;
  bool may_wait = false;
  void (*body)(void* const*) = nullptr;
  void* const* args = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
#endif
};

Block& ThisBlock() {
  static thread_local Block block;
  return block;
}

#if EK_FIBERS_JUMP

// Not inlined: a jump must not end in the function that it starts in. Nor instrumented:
// ThreadSanitizer counts calls and returns.
[[gnu::noinline, gnu::no_sanitize_thread]] void JumpTo(void** place) {
  __builtin_longjmp(place, 1);
}
[[gnu::noinline, gnu::no_sanitize_thread]] void Switch(void** from, void** to) {
  if (__builtin_setjmp(from) == 0) JumpTo(to);
}
[[gnu::noinline, gnu::no_sanitize_thread]] void EnterFirst(void** from, const ucontext_t* to) {
  if (__builtin_setjmp(from) == 0) setcontext(to);
}

// A fiber lives as long as its thread, and runs its part of one block after the other.
[[gnu::no_sanitize_thread]] void RunFiber() {
  Block& block = ThisBlock();
  while (true) {
    block.body(block.args);
    Fiber& fiber = block.fibers[block.current];
    fiber.is_done = true;
    Switch(fiber.place, block.scheduler_place);
  }
}

void EnterFiber(Block& block, Fiber& fiber) {
  if (fiber.is_entered) return Switch(block.scheduler_place, fiber.place);
  fiber.is_entered = true;
  EnterFirst(block.scheduler_place, &fiber.context);
}

void LeaveFiber(Block& block, Fiber& fiber) { Switch(fiber.place, block.scheduler_place); }

#else

// Sanitizers keep account of stacks, and want to be told before and after each change of it.
void EnterFiber(Block& block, Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
#endif
  swapcontext(&block.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void LeaveFiber(Block& block, Fiber& fiber, bool is_last = false) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(is_last ? nullptr : &fake_stack, block.scheduler_stack,
                                 block.scheduler_stack_bytes);
#else
  (void)is_last;
#endif
  swapcontext(&fiber.context, &block.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
}

void RunFiber() {
  Block& block = ThisBlock();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
  block.body(block.args);
  Fiber& fiber = block.fibers[block.current];
  fiber.is_done = true;
  LeaveFiber(block, fiber, /*is_last=*/true);
}

#endif

void Prepare(Fiber& fiber) {
  fiber.is_done = false;
#if EK_FIBERS_JUMP
  if (fiber.is_entered) return;
#endif
  if (fiber.stack == nullptr)
    fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, RunFiber, 0);
}

void RunWaitingBlock(Block& block, int threads) {
  if (static_cast<int>(block.fibers.size()) < threads) block.fibers.resize(threads);
  for (int t = 0; t < threads; ++t) Prepare(block.fibers[t]);
  for (int done = 0; done < threads;) {
    done = 0;
    for (int t = 0; t < threads; ++t) {
      block.current = t;
      HostThread().thread = t;
      EnterFiber(block, block.fibers[t]);
      done += block.fibers[t].is_done;
    }
    if (done == 0 || done == threads) continue;
    std::fprintf(
        stderr,
        "a kernel's block %ld: %d of its %d threads have ended where the others wait for them\n",
        static_cast<long>(HostThread().block), done, threads);
    std::abort();
  }
}

}  // namespace

HostThreadPlace& HostThread() {
  static thread_local HostThreadPlace place;
  return place;
}

void WaitForBlock() {
  Block& block = ThisBlock();
  if (!block.may_wait) {
    std::fprintf(
        stderr, "a kernel's threads wait for each other: make it with KernelKind::kSynchronises\n");
    std::abort();
  }
  LeaveFiber(block, block.fibers[block.current]);
}

double& Mailbox(int thread) { return ThisBlock().mailboxes[thread]; }

float HalfToFloat(uint16_t bits) { return FloatFromFloat16(bits); }
uint16_t FloatToHalf(float value) { return Float16FromFloat(value); }

void RunOnHost(const DeviceKernel& kernel, const LaunchShape& shape, void* const* args) {
  Block& block = ThisBlock();
  block.may_wait = kernel.kind == KernelKind::kSynchronises;
  block.body = kernel.on_host;
  block.args = args;
  HostThreadPlace& place = HostThread();
  place.threads = shape.threads;
  place.blocks = shape.blocks;
  for (place.row = 0; place.row < shape.rows; ++place.row) {
    for (place.block = 0; place.block < shape.blocks; ++place.block) {
      if (block.may_wait) {
        RunWaitingBlock(block, shape.threads);
        continue;
      }
      for (place.thread = 0; place.thread < shape.threads; ++place.thread) kernel.on_host(args);
    }
  }
}

}  // namespace evenkeel::internal
