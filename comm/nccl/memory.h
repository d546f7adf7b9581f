// A device's memory as NCCL likes it best: allocated by NCCL and registered with the group, where
// NCCL offers that.
//
//   NcclMemory memory(runtime, api, connection, {.device = device, .rank = rank});
//   EK_ASSIGN_OR_RETURN(Memory buffer, memory.Allocate(bytes));
//   memory.LayoutOf(operation, plan)
//
// NCCL wants that either all ranks of an operation pass registered memory, at equal places in it,
// or none: the layout of an operation's views says so, and ranks compare it (launch_order.h).
//
// Threads:   thread-safe.
// Ownership: buffers may outlive this, the connection and the group. What NCCL or the group's
//            stream may still use after an abort is never freed.
// Errors:    what NCCL would not register is plain memory. `warn` is told of the first time, on the
//            thread that allocates; not if NCCL is one that registers nothing.

#ifndef EVENKEEL_COMM_NCCL_MEMORY_H_
#define EVENKEEL_COMM_NCCL_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/connection.h"
#include "evenkeel/comm/nccl/plan.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

class NcclMemory {
 public:
  struct Settings {
    Device device;
    int rank = 0;
    int64_t least_registered = 0;  // Less bytes are plain memory: NCCL's comes in large pieces.
    std::function<void(const std::string& text)> warn;  // Null: to stderr.
  };
  NcclMemory(DeviceRuntime& runtime, NcclApi& api, std::shared_ptr<NcclConnection> connection,
             Settings settings);

  // Zeroed.
  absl::StatusOr<Memory> Allocate(int64_t bytes);

  // Equal on ranks whose views NCCL may use together as they are. `plan`: what this rank would do
  // if they are.
  uint64_t LayoutOf(const Operation& operation, const NcclPlan& plan) const;

 private:
  // Where registered memory lies.
  class Places {
   public:
    void Add(const void* data, int64_t bytes);
    void Remove(const void* data);
    // How far into a piece of it; -1: in none.
    int64_t OffsetOf(const void* data) const;

   private:
    mutable absl::Mutex mutex_;
    std::map<uintptr_t, int64_t> bytes_ ABSL_GUARDED_BY(mutex_);  // By where they begin.
  };

  // `refused`: by NCCL, while the group works.
  absl::StatusOr<Memory> AllocateRegistered(int64_t bytes, bool* refused);
  absl::Status Clear(const Memory& memory);
  void Warn(int64_t bytes, const absl::Status& why);

  DeviceRuntime& runtime_;
  NcclApi& api_;
  const std::shared_ptr<NcclConnection> connection_;
  const Settings settings_;
  std::atomic<bool> has_warned_ = false;
  const std::shared_ptr<Places> places_ = std::make_shared<Places>();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_MEMORY_H_
