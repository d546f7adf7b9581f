#include "evenkeel/comm/local/local.h"

#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// The groups of ranks that are threads of one process. The first rank that asks for its half of a
// group has all made.
class LocalJob {
 public:
  std::unique_ptr<Backend> Take(absl::string_view group, int rank, int world_size) {
    absl::MutexLock lock(&mutex_);
    std::vector<std::unique_ptr<Backend>>& halves = groups_[std::string(group)];
    if (halves.empty()) halves = internal::CreateLocalBackends(world_size);
    return std::move(halves[rank]);
  }

 private:
  absl::Mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Backend>>> groups_ ABSL_GUARDED_BY(mutex_);
};

std::unique_ptr<Communicator> MakeRank(const std::shared_ptr<LocalJob>& job,
                                       const CommunicatorOptions& options, absl::string_view group,
                                       int rank, int world_size,
                                       std::unique_ptr<ControlLink> link) {
  return std::make_unique<Communicator>(
      job->Take(group, rank, world_size),
      std::make_unique<ControlChannel>(rank, world_size, std::move(link)), options, group,
      [job, options](absl::string_view next, int next_rank, int next_world_size,
                     std::unique_ptr<ControlLink> next_link,
                     absl::Duration timeout) -> absl::StatusOr<std::unique_ptr<Communicator>> {
        auto comm = MakeRank(job, options, next, next_rank, next_world_size, std::move(next_link));
        EK_RETURN_IF_ERROR(
            internal::AwaitArrival(comm->control(), "arrival", "", {std::string(next), timeout})
                .status());
        return comm;
      });
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(
    int world_size, CommunicatorOptions options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("CreateLocalGroup: a group of ", world_size, " ranks"));
  }
  const auto job = std::make_shared<LocalJob>();
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    group.push_back(MakeRank(job, options, "world", rank, world_size, std::move(links[rank])));
  }
  return group;
}

absl::Status RunRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                      CommunicatorOptions options) {
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group,
                      CreateLocalGroup(world_size, options));
  return internal::RunGroup(group, body);
}

}  // namespace evenkeel
