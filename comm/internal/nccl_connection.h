// One NCCL communicator: calls into it one at a time, waits for what is in progress, and its end, from any thread.
//
//   auto connection = std::make_shared<NcclConnection>(api, device);
//   EK_RETURN_IF_ERROR(connection->Open(id, rank, world_size, deadline));
//   EK_RETURN_IF_ERROR(connection->Call("all_reduce", [&](NcclComm comm) { return api.Enqueue(..., comm, stream); }));
//   EK_RETURN_IF_ERROR(connection->AwaitProgress("all_reduce", deadline));
//   ...
//   connection->Abort(why);
//
// The communicator is non-blocking, and NCCL has nothing to wait on: what is in progress is polled for.
//
// Threads: thread-safe.
// Errors:  after Abort() everything answers its cause. An abort waits for a bounded time, for a call that does not come
//          back and for NCCL itself, and then says so and leaves them behind.

#ifndef EVENKEEL_COMM_INTERNAL_NCCL_CONNECTION_H_
#define EVENKEEL_COMM_INTERNAL_NCCL_CONNECTION_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/nccl_api.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

class NcclConnection {
 public:
  NcclConnection(NcclApi& api, Device device, absl::Duration patience = absl::Seconds(10))
      : api_(api), device_(device), patience_(patience) {}
  ~NcclConnection();
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  // Waits until all ranks of the group have come here.
  absl::Status Open(const std::string& id, int rank, int world_size, absl::Time deadline);
  // Comes after what is in progress.
  absl::Status Call(absl::string_view what, absl::FunctionRef<NcclAnswer(NcclComm)> call);
  // Until NCCL has done what it was told.
  absl::Status AwaitProgress(absl::string_view what, absl::Time deadline);
  // OK, or what has gone wrong by itself.
  absl::Status CheckErrors(absl::string_view what);

  // Ends the kernels that wait for peers; only the first call's `why` counts. OK once NCCL has let go of everything;
  // DeadlineExceeded if it has not in time.
  absl::Status Abort(const absl::Status& why);
  bool is_left_behind() const;  // NCCL may still use memory of this communicator.

 private:
  // What a call is: only questions may come while something is in progress.
  enum class Kind { kCommand, kQuestion };
  absl::Status Begin(Kind kind, NcclComm* comm);
  void End(const NcclAnswer& answer);
  absl::Status Ask(absl::string_view what, NcclAnswer* state);

  NcclApi& api_;
  const Device device_;
  const absl::Duration patience_;
  mutable absl::Mutex mutex_;
  NcclComm comm_ ABSL_GUARDED_BY(mutex_) = nullptr;  // Null before Open() and after Abort().
  bool is_busy_ ABSL_GUARDED_BY(mutex_) = false;     // A call runs.
  bool is_in_progress_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool has_let_go_ ABSL_GUARDED_BY(mutex_) = false;  // Abort() is over, one way or the other.
  absl::Status abort_ ABSL_GUARDED_BY(mutex_);       // What it answered.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_NCCL_CONNECTION_H_
