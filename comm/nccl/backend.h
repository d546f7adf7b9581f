// The backend over NCCL: an operation's way from its call to its end.
//
// Start() marks its place on the caller's stream, and adds it to the launch queue. When all ranks
// have issued it, the queue calls Launch() on its thread, which puts it on the group's stream with
// an event behind it. The completion thread sees that the event has passed and ends the work; it
// also sees errors that occur outside of calls.
//
// States: a flight is queued, then launched (in `flights_`), then ended. Abort() ends what is
//         queued and launched; a flight that is being launched ends itself, because every call into
//         NCCL returns the cause from then on.
//
// Ends:   all waits of an abort are bounded, and so are those of the destructor, but for one: a
//         launch that is inside a call which does not come back although NCCL has been aborted.
//
// Threads: as Backend. `connection` and `runtime` calls are made on the launch thread, the
//          completion thread, and threads that abort; NCCL's communicator is used by one of them at
//          a time.

#ifndef EVENKEEL_COMM_NCCL_BACKEND_H_
#define EVENKEEL_COMM_NCCL_BACKEND_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/collectives.h"
#include "evenkeel/comm/nccl/connection.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/nccl/launch_queue.h"
#include "evenkeel/comm/nccl/memory.h"

namespace evenkeel::internal {

class NcclBackend : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<NcclBackend>> Create(DeviceRuntime& runtime,
                                                             absl::StatusOr<NcclApi*> api, int rank,
                                                             int world_size,
                                                             const NcclGroupOptions& options);
  ~NcclBackend() override;

  // Waits until all ranks call it. `control` outlives this backend.
  absl::Status Connect(ControlChannel& control);

  absl::string_view name() const override { return "nccl"; }
  Device device() const override { return device_; }
  DeviceRuntime* runtime() const override { return &runtime_; }
  absl::Status Supports(const Collective& what) const override { return SupportedByNccl(what); }
  // NCCL sends no header; but nothing is launched that rank 0 has not compared.
  bool checks_pairs() const override { return true; }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override;
  void Abort(const absl::Status& why) override;
  absl::StatusOr<Memory> Allocate(int64_t bytes) override { return memory_.Allocate(bytes); }

 private:
  // The part of an operation that OrderBefore() needs, also after the operation's end.
  struct Mark {
    Notification is_decided;
    Event done;  // Behind the operation; null if it was never launched.
  };
  struct Flight {
    Operation operation;
    std::shared_ptr<WorkState> work;
    Event ready;  // Behind what was on the caller's stream.
    std::shared_ptr<Mark> mark = std::make_shared<Mark>();
    std::vector<Memory> kept;  // Memory that the stream still uses.
  };

  NcclBackend(DeviceRuntime& runtime, NcclApi& api, int rank, int world_size,
              const NcclGroupOptions& options, Stream stream);

  absl::StatusOr<std::string> AgreeOnId(ControlChannel& control, absl::Duration timeout);
  absl::Status OrderBefore(const Operation& operation, const Mark& mark, StreamRef stream,
                           absl::Time deadline);
  void Launch(const std::shared_ptr<Flight>& flight, bool is_alike);
  absl::Status PutOnStream(Flight& flight, bool is_alike);
  // Waits, for a bounded time, until neither NCCL nor the stream uses any memory; an error names
  // the memory still in use, which is never freed.
  absl::Status LetGo(const absl::Status& why);
  absl::Status Drain();

  // The completion thread.
  void WatchCompletions();
  std::shared_ptr<Flight> NextFlight();
  // Null: nothing is in flight. An error: of the device, or of NCCL.
  absl::StatusOr<bool> IsOver(const Flight* flight);
  void EndGroup(const absl::Status& why);

  DeviceRuntime& runtime_;
  NcclApi& api_;
  const int rank_;
  const int world_size_;
  const NcclGroupOptions options_;
  const Device device_;
  const std::shared_ptr<NcclConnection> connection_;
  NcclMemory memory_;
  NcclCollectives collectives_;  // The launch thread only.
  const Stream stream_;
  ControlChannel* control_ = nullptr;  // From Connect().

  absl::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool is_launching_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_drained_ ABSL_GUARDED_BY(mutex_) = false;  // Abort() is over.
  bool is_leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Flight>> flights_
      ABSL_GUARDED_BY(mutex_);  // Launched, in stream order.
  std::deque<std::shared_ptr<Flight>> broken_
      ABSL_GUARDED_BY(mutex_);          // Those whose launch has failed.
  std::unique_ptr<LaunchQueue> queue_;  // Made by Connect(), before the first operation.
  std::thread completions_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_BACKEND_H_
