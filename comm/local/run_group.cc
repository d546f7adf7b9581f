#include "evenkeel/comm/local/run_group.h"

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/start_thread.h"
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
