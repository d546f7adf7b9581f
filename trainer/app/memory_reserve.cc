#include "evenkeel/trainer/app/memory_reserve.h"

#include <sys/mman.h>

#include <cstddef>
#include <mutex>
#include <new>

namespace evenkeel {
namespace {

// glibc takes at least 1 MiB at a time from the system where a heap cannot grow.
constexpr size_t kReserve = 16 << 20;

void* reserve = nullptr;

void ReleaseReserve() {
  static std::mutex mutex;  // Only one of the threads whose allocations fail releases it.
  const std::lock_guard lock(mutex);
  if (reserve == nullptr) throw std::bad_alloc();
  munmap(reserve, kReserve);
  reserve = nullptr;
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
