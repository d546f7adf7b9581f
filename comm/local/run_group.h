// Groups whose communicators are all in this process.
//
//   return CreateInProcess("CreateTcpGroupInProcess", world_size,
//                          [&](int rank, std::unique_ptr<ControlLink> link) {
//                            return CreateTcpGroup(rank, world_size, std::move(link), options);
//                          });
//
//   EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group, CreateLocalGroup(4));
//   absl::Status status = RunGroup(group, [](Communicator& comm) { return comm.Barrier(); });
//
// Threads: each call returns when the threads of all ranks have ended.

#ifndef EVENKEEL_COMM_LOCAL_RUN_GROUP_H_
#define EVENKEEL_COMM_LOCAL_RUN_GROUP_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel::internal {

// Calls `create` once per rank, each on a thread of its own, since ranks wait for each other.
// Errors: InvalidArgument, which names `caller`, unless world_size is at least 1; else the error of
// the lowest failing rank.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateInProcess(
    absl::string_view caller, int world_size,
    absl::FunctionRef<
        absl::StatusOr<std::unique_ptr<Communicator>>(int rank, std::unique_ptr<ControlLink> link)>
        create);

// Runs a function once per rank, each on a thread of its own. A rank that returns OK finalizes; one
// that returns an error, or throws, aborts the others. Returns OK, or the error of the rank that
// failed first, with its rank.
absl::Status RunGroup(absl::Span<const std::unique_ptr<Communicator>> group,
                      absl::FunctionRef<absl::Status(Communicator&)> body);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_RUN_GROUP_H_
