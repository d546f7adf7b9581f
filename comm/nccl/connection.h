// One NCCL communicator: calls into it one at a time, waits for what is in progress, and its end,
//                        from any thread.
//
//   auto connection = std::make_shared<NcclConnection>(api, device);
//   EK_RETURN_IF_ERROR(connection->Open(id, rank, world_size, deadline));
//   EK_RETURN_IF_ERROR(connection->Call("all_reduce", deadline,
//                                  [&](NcclComm comm) { return api.Enqueue(..., comm, stream); }));
//   EK_RETURN_IF_ERROR(connection->AwaitProgress("all_reduce", deadline));
//   ...
//   connection->Abort(why);
//
// The communicator is non-blocking, and NCCL has nothing to wait on: what is in progress is polled
// for.
//
// Threads: thread-safe.
// Errors:  after Abort() everything answers its cause. An abort waits for a bounded time, for a
//          call that does not come back and for NCCL itself, and then says so and leaves them
//          behind. What they may still use is never freed.

#ifndef EVENKEEL_COMM_NCCL_CONNECTION_H_
#define EVENKEEL_COMM_NCCL_CONNECTION_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

class NcclConnection {
 public:
  NcclConnection(NcclApi& api, Device device, absl::Duration patience = absl::Seconds(10))
      : api_(api), device_(device), patience_(patience) {}
  ~NcclConnection();
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  // Waits until all ranks of the group have come here. If an abort comes first, this one ends what
  // it has made.
  absl::Status Open(const std::string& id, int rank, int world_size, absl::Time deadline);
  // Comes after what is in progress; not at all if that is not over at the deadline.
  absl::Status Call(absl::string_view what, absl::Time deadline,
                    absl::FunctionRef<NcclAnswer(NcclComm)> call);
  // Until NCCL has done what it was told.
  absl::Status AwaitProgress(absl::string_view what, absl::Time deadline);
  // OK, or what has gone wrong by itself. Waits for a call that runs, until that is over or Abort()
  // comes.
  absl::Status CheckErrors(absl::string_view what);

  // Ends the kernels that wait for peers; only the first call's `why` counts. OK once NCCL has let
  // go of everything; DeadlineExceeded if it has not in time.
  absl::Status Abort(const absl::Status& why);
  // After Abort(): the stream was not empty in time either.
  void LeaveBehind();
  bool has_ended() const;
  // Whether nobody is left who may use the group's memory without its owner's knowing. Waits for an
  // abort that is under way, for a bounded time.
  bool MayFree() const;

 private:
  // The kind of a call: only queries are allowed while a call is in progress.
  enum class Kind { kCommand, kQuestion };
  absl::Status Begin(absl::string_view what, Kind kind, absl::Time deadline, NcclComm* comm);
  void End(const NcclAnswer& answer);
  absl::Status Ask(absl::string_view what, absl::Time deadline, NcclAnswer* state);

  NcclApi& api_;
  const Device device_;
  const absl::Duration patience_;
  mutable absl::Mutex mutex_;
  NcclComm comm_ ABSL_GUARDED_BY(mutex_) = nullptr;  // Null before Open() and after Abort().
  bool is_busy_ ABSL_GUARDED_BY(mutex_) = false;     // A call runs.
  bool is_in_progress_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool has_let_go_ ABSL_GUARDED_BY(mutex_) = false;  // Abort() is over, one way or the other.
  absl::Status abort_ ABSL_GUARDED_BY(mutex_);       // The result of Abort().
  absl::Status late_abort_ ABSL_GUARDED_BY(mutex_);  // The result of the abort in Open().
  bool is_left_behind_ ABSL_GUARDED_BY(mutex_) = false;
};

// Never freed. For what somebody may use who can't be waited for.
void KeepForever(std::shared_ptr<void> what);
// The same memory, kept for ever instead of freed where the connection's MayFree() says no.
Memory FreedByLeaveOf(std::shared_ptr<const NcclConnection> connection, Memory memory);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_CONNECTION_H_
