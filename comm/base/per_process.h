// An object that a forked child does not share with its parent: the child gets a fresh one, because
// it has neither its parent's threads nor the right to use its parent's connections.
//
//   static auto* connections = new PerProcess<Connections>;
//   absl::MutexLock lock(&connections->Get().mutex);
//
// Objects are never freed, and a child never looks at its parent's, whose locks may be held for
// ever.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_BASE_PER_PROCESS_H_
#define EVENKEEL_COMM_BASE_PER_PROCESS_H_

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>

namespace evenkeel::internal {

template <typename T>
class PerProcess {
 public:
  T& Get() {
    Slot* slot = slot_.load();
    while (slot == nullptr || slot->pid != getpid()) {
      auto fresh = std::make_unique<Slot>();
      if (slot_.compare_exchange_strong(slot, fresh.get())) slot = fresh.release();
    }
    return slot->value;
  }

 private:
  struct Slot {
    const pid_t pid = getpid();
    T value;
  };
  std::atomic<Slot*> slot_ = nullptr;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_PER_PROCESS_H_
