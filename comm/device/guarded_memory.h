// Memory that can be touched only within a scope: how a simulated device finds out that the host
// touches its memory, which works in a simulation and ends the process on a GPU.
//
//   GuardedMemory memory(int64_t{1} << 30);
//   void* data = memory.Take(bytes);  // null if there is no room; aligned to 256 bytes
//   { GuardedMemory::Open open(memory); ... data may be touched, on any thread ... }
//   *static_cast<char*>(data);                          // ends the process with a sentence
//
// Freed memory is not used again.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_DEVICE_GUARDED_MEMORY_H_
#define EVENKEEL_COMM_DEVICE_GUARDED_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel::internal {

class GuardedMemory {
 public:
  explicit GuardedMemory(int64_t bytes);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* Take(int64_t bytes);

  class Open {
   public:
    explicit Open(GuardedMemory& memory) : memory_(memory) { memory_.Change(+1); }
    ~Open() { memory_.Change(-1); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    GuardedMemory& memory_;
  };

 private:
  void Change(int by);

  const int64_t bytes_;
  std::byte* const base_;
  absl::Mutex mutex_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_DEVICE_GUARDED_MEMORY_H_
