#include "evenkeel/comm/local.h"

#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/local_backend.h"
#include "evenkeel/comm/local_link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
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

// Keeps the status that failed first.
class FirstFailure {
 public:
  void Note(int rank, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = Annotate(status, absl::StrCat("rank ", rank));
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

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(int world_size,
                                                                            CommunicatorOptions options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("CreateLocalGroup: a group of ", world_size, " ranks"));
  }
  std::vector<std::unique_ptr<Backend>> backends = internal::CreateLocalBackends(world_size);
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    auto control = std::make_unique<ControlChannel>(rank, world_size, std::move(links[rank]));
    group.push_back(std::make_unique<Communicator>(std::move(backends[rank]), std::move(control), options));
  }
  return group;
}

absl::Status RunRanks(int world_size, Body body, CommunicatorOptions options) {
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group, CreateLocalGroup(world_size, options));
  FirstFailure failure;
  std::vector<std::thread> threads;
  for (std::unique_ptr<Communicator>& comm : group) {
    threads.emplace_back([&, &comm = *comm] {
      absl::Status status = Call(body, comm);
      if (status.ok()) status = comm.Finalize(options.timeout);
      if (status.ok()) return;
      failure.Note(comm.rank(), status);  // Before the others can fail because of it.
      comm.Abort(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failure.status();
}

}  // namespace evenkeel
