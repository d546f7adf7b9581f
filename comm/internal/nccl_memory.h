// A device's memory as NCCL likes it best: allocated by NCCL and registered with the group, where NCCL offers that.
//
//   NcclMemory memory(runtime, api, device, connection);
//   EK_ASSIGN_OR_RETURN(Memory buffer, memory.Allocate(bytes));
//   memory.LayoutOf(operation, plan)
//
// NCCL wants that either all ranks of an operation pass registered memory, at equal places in it, or none: the layout of
// an operation's views says so, and ranks compare it (internal/launch_order.h).
//
// Threads:   thread-safe.
// Ownership: buffers may outlive this, the connection and the group; what NCCL would not let go of is never freed.

#ifndef EVENKEEL_COMM_INTERNAL_NCCL_MEMORY_H_
#define EVENKEEL_COMM_INTERNAL_NCCL_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/internal/nccl_api.h"
#include "evenkeel/comm/internal/nccl_connection.h"
#include "evenkeel/comm/internal/nccl_plan.h"
#include "evenkeel/comm/memory.h"

namespace evenkeel::internal {

class NcclMemory {
 public:
  // Less than `least_registered` bytes are plain memory: NCCL's comes in large pieces.
  NcclMemory(DeviceRuntime& runtime, NcclApi& api, Device device, std::shared_ptr<NcclConnection> connection,
             int64_t least_registered);

  // Zeroed.
  absl::StatusOr<Memory> Allocate(int64_t bytes);

  // Equal on ranks whose views NCCL may use together as they are. `plan`: what this rank would do if they are.
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

  absl::StatusOr<Memory> AllocateRegistered(int64_t bytes);
  absl::Status Clear(const Memory& memory);

  DeviceRuntime& runtime_;
  NcclApi& api_;
  const Device device_;
  const std::shared_ptr<NcclConnection> connection_;
  const int64_t least_registered_;
  const std::shared_ptr<Places> places_ = std::make_shared<Places>();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_NCCL_MEMORY_H_
