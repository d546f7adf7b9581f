#include "evenkeel/comm/device/guarded_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace evenkeel::internal {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int kMostAreas = 64;

// Memory areas that the signal handler reads.
struct Area {
  std::atomic<const std::byte*> begin = nullptr;
  std::atomic<int64_t> bytes = 0;
};
Area areas[kMostAreas];
struct sigaction handler_before;

void OnFault(int, siginfo_t* info, void*) {
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  for (const Area& area : areas) {
    const std::byte* const begin = area.begin.load();
    if (begin == nullptr || at < begin || at >= begin + area.bytes.load()) continue;
    constexpr char kSentence[] =
        "the host touches a simulated device's memory, which ends a process on a GPU: copy it, or "
        "launch a kernel\n";
    (void)!write(STDERR_FILENO, kSentence, sizeof(kSentence) - 1);
    break;
  }
  sigaction(SIGSEGV, &handler_before, nullptr);  // It faults again, for whoever was to handle it.
}

void HandleFaults() {
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &handler_before) == 0;
  }();
  (void)once;
}

std::byte* Reserve(int64_t bytes) {
  void* const base =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base != MAP_FAILED) return static_cast<std::byte*>(base);
  std::perror("no address space for a simulated device's memory");
  std::abort();
}

}  // namespace

GuardedMemory::GuardedMemory(int64_t bytes) : bytes_(bytes), base_(Reserve(bytes)) {
  HandleFaults();
  for (Area& area : areas) {
    const std::byte* nothing = nullptr;
    if (!area.begin.compare_exchange_strong(nothing, base_)) continue;
    area.bytes = bytes_;
    return;
  }
}

GuardedMemory::~GuardedMemory() {
  for (Area& area : areas) {
    if (area.begin == base_) area.begin = nullptr;
  }
  munmap(base_, bytes_);
}

void* GuardedMemory::Take(int64_t bytes) {
  const int64_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  absl::MutexLock lock(&mutex_);
  if (wanted > bytes_ - taken_) return nullptr;
  std::byte* const data = base_ + taken_;
  taken_ += wanted;
  return data;
}

void GuardedMemory::Change(int by) {
  absl::MutexLock lock(&mutex_);
  open_ += by;
  const bool has_changed = open_ == (by > 0 ? 1 : 0);
  if (!has_changed || mprotect(base_, bytes_, by > 0 ? PROT_READ | PROT_WRITE : PROT_NONE) == 0)
    return;
  std::perror("mprotect of a simulated device's memory");
  std::abort();
}

}  // namespace evenkeel::internal
