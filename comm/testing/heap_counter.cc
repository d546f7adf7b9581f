// The allocation functions of this program are ours and call glibc's by their inner names; memcpy
// and memmove are exchanged by the linker (--wrap), because a definition of our own would be what
// it calls itself.

#include "evenkeel/comm/testing/heap_counter.h"

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVENKEEL_HEAP_IS_COUNTED 0
#else
#define EVENKEEL_HEAP_IS_COUNTED 1
#endif

namespace evenkeel {
namespace {

// Plain data: they must work before and after everything else.
thread_local int64_t thread_allocations = 0, thread_copied = 0;
std::atomic<int64_t> all_allocations{0}, all_copied{0}, live{0}, peak{0};

[[maybe_unused]] void* Taken(void* block) {
  if (block == nullptr) return block;
  ++thread_allocations;
  all_allocations.fetch_add(1, std::memory_order_relaxed);
  const int64_t size = static_cast<int64_t>(malloc_usable_size(block));
  const int64_t now = live.fetch_add(size, std::memory_order_relaxed) + size;
  int64_t most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
  return block;
}

[[maybe_unused]] void Given(void* block) {
  if (block != nullptr)
    live.fetch_sub(static_cast<int64_t>(malloc_usable_size(block)), std::memory_order_relaxed);
}

[[maybe_unused]] void Copied(size_t bytes) {
  if (bytes < kSmallCopy) return;
  thread_copied += static_cast<int64_t>(bytes);
  all_copied.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

}  // namespace

bool HeapIsCounted() { return EVENKEEL_HEAP_IS_COUNTED; }
HeapCounts HeapCountsOfThread() { return {thread_allocations, thread_copied}; }
HeapCounts HeapCountsOfProcess() { return {all_allocations.load(), all_copied.load()}; }
int64_t LiveBytes() { return live.load(); }
int64_t PeakBytes() { return peak.load(); }
void ResetPeakBytes() { peak.store(live.load()); }

}  // namespace evenkeel

extern "C" {

#if EVENKEEL_HEAP_IS_COUNTED
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* block, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* block);

void* malloc(size_t size) { return evenkeel::Taken(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return evenkeel::Taken(__libc_calloc(count, size)); }
void* realloc(void* block, size_t size) {
  evenkeel::Given(block);
  return evenkeel::Taken(__libc_realloc(block, size));
}
void* memalign(size_t alignment, size_t size) {
  return evenkeel::Taken(__libc_memalign(alignment, size));
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** block, size_t alignment, size_t size) {
  *block = memalign(alignment, size);
  return *block == nullptr ? ENOMEM : 0;
}
void free(void* block) {
  evenkeel::Given(block);
  __libc_free(block);
}
#endif

void* __real_memcpy(void* to, const void* from, size_t size);
void* __real_memmove(void* to, const void* from, size_t size);
void* __wrap_memcpy(void* to, const void* from, size_t size) {
  evenkeel::Copied(size);
  return __real_memcpy(to, from, size);
}
void* __wrap_memmove(void* to, const void* from, size_t size) {
  evenkeel::Copied(size);
  return __real_memmove(to, from, size);
}
// Called by hardened builds.
void* __wrap___memcpy_chk(void* to, const void* from, size_t size, size_t) {
  return __wrap_memcpy(to, from, size);
}
void* __wrap___memmove_chk(void* to, const void* from, size_t size, size_t) {
  return __wrap_memmove(to, from, size);
}
}
