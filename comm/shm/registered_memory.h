// The shared memory that this process has given to its users, found again by address: what
// Communicator::Allocate() hands out where ranks share memory.
//
//   EK_ASSIGN_OR_RETURN(Memory memory, AllocateRegistered(bytes));          // for the user
//   // when an operation comes
//   std::optional<RegisteredRange> range = FindRegistered(data, length);
//
// It belongs to no group: a buffer that outlives its group serves the next one. Who has handed a
// descriptor of it to peers is told when the user frees it.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_SHM_REGISTERED_MEMORY_H_
#define EVENKEEL_COMM_SHM_REGISTERED_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/shared_memory.h"

namespace evenkeel::internal {

struct RegisteredMemory {
  uint64_t id = 0;  // Never given twice in this process, never 0.
  std::shared_ptr<SharedMemory> memory;
  // Fenced once, so not for peers any more: a part of it is this process's alone.
  std::atomic<bool> is_retired = false;
};

struct RegisteredRange {
  std::shared_ptr<RegisteredMemory> in;
  int64_t offset = 0;  // Of the range's first byte.
  // Whether peers may write to it: it begins with a page, and nobody else's bytes are in its last
  // page, because it ends with the page or with what the user asked for. Only so could it be
  // fenced.
  bool is_writable = false;
};

// At least `bytes`, zeroed, page by page. Errors: those of SharedMemory::Create().
absl::StatusOr<Memory> AllocateRegistered(int64_t bytes);

// Null if the bytes are not all in one piece of registered memory, or if it is retired. Costs about
// 50 ns.
std::optional<RegisteredRange> FindRegistered(const void* data, int64_t bytes);

// `freed` is called, with the id, whenever the user frees registered memory, until the handle goes;
// not after that has returned. It must not let go of its own handle, nor free registered memory.
std::shared_ptr<void> WhenRegisteredIsFreed(std::function<void(uint64_t id)> freed);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_REGISTERED_MEMORY_H_
