#include "evenkeel/comm/local/run_group.h"

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

using Body = absl::FunctionRef<absl::Status(Communicator&)>;

// The body is a user's: an exception of its own is the rank's failure, not the end of the process.
absl::Status Call(Body body, Communicator& comm) {
  try {
    return body(comm);
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("exception: ", error.what()));
  } catch (...) {
    return absl::InternalError("exception of an unknown type");
  }
}

// Keeps the status that failed first; one that only says that a peer is gone gives way to that
// peer's own.
class FirstFailure {
 public:
  void Note(int rank, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok() || (absl::IsUnavailable(status_) && !absl::IsUnavailable(status))) {
      status_ = Annotate(status, absl::StrCat("rank ", rank));
    }
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateInProcess(
    absl::string_view caller, int world_size,
    absl::FunctionRef<
        absl::StatusOr<std::unique_ptr<Communicator>>(int rank, std::unique_ptr<ControlLink> link)>
        create) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(caller, ": a group of ", world_size, " ranks"));
  }
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> made(world_size);
  // The ranks meet each other, so none begins before all have their threads.
  Notification go;
  absl::Status started;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size && started.ok(); ++rank) {
    absl::StatusOr<std::thread> thread =
        StartThread(absl::StrCat("rank ", rank, " of a group in this process"), [&, rank] {
          go.WaitUntil(absl::InfiniteFuture());
          if (started.ok()) made[rank] = create(rank, std::move(links[rank]));
        });
    started = thread.status();
    if (thread.ok()) threads.push_back(*std::move(thread));
  }
  go.Notify();
  for (std::thread& thread : threads) thread.join();
  EK_RETURN_IF_ERROR(started);
  std::vector<std::unique_ptr<Communicator>> group;
  for (absl::StatusOr<std::unique_ptr<Communicator>>& one : made) {
    EK_RETURN_IF_ERROR(one.status());
    group.push_back(*std::move(one));
  }
  return group;
}

absl::Status RunGroup(absl::Span<const std::unique_ptr<Communicator>> group, Body body) {
  FirstFailure failure;
  std::vector<std::thread> threads;
  const auto end_with = [&](Communicator& comm, const absl::Status& status) {
    failure.Note(comm.rank(), status);  // Before the others can fail because of it.
    comm.Abort(status);
  };
  for (const std::unique_ptr<Communicator>& comm : group) {
    absl::StatusOr<std::thread> thread = internal::StartThread("it", [&, &comm = *comm] {
      absl::Status status = Call(body, comm);
      if (status.ok()) status = comm.Finalize(comm.timeout());
      if (!status.ok()) end_with(comm, status);
    });
    if (!thread.ok()) {
      end_with(*comm, thread.status());
      break;
    }
    threads.push_back(*std::move(thread));
  }
  for (std::thread& thread : threads) thread.join();
  return failure.status();
}

}  // namespace evenkeel::internal
