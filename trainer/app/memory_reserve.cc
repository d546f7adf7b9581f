#include "evenkeel/trainer/app/memory_reserve.h"

#include <sys/mman.h>

#include <cstddef>
#include <mutex>
#include <new>
#include <utility>

namespace evenkeel {
namespace {

// glibc takes at least 1 MiB at a time from the system where a heap cannot grow.
constexpr size_t kReserve = 16 << 20;

void* reserve = nullptr;

void ReleaseReserve() {
  static std::mutex mutex;
  // The allocation of another thread may have failed before the release, so each retries once.
  thread_local bool has_retried = false;
  const std::lock_guard lock(mutex);
  if (reserve != nullptr) {
    munmap(std::exchange(reserve, nullptr), kReserve);
  } else if (std::exchange(has_retried, true)) {
    throw std::bad_alloc();
  }
}

}  // namespace

void KeepMemoryReserve() {
  // Address space alone: pages that are never touched take no memory.
  void* const memory =
      mmap(nullptr, kReserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  reserve = memory;
  std::set_new_handler(ReleaseReserve);
}

}  // namespace evenkeel
