// Runs a function once per rank of a group whose communicators are all in this process.
//
//   EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group, CreateLocalGroup(4));
//   absl::Status status = RunGroup(group, [](Communicator& comm) { return comm.Barrier(); });
//
// Each rank has a thread of its own. A rank that returns OK finalizes; one that returns an error,
// or throws, aborts the others. Answers OK, or the error of the rank that failed first, with its
// rank.

#ifndef EVENKEEL_COMM_LOCAL_RUN_GROUP_H_
#define EVENKEEL_COMM_LOCAL_RUN_GROUP_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::internal {

absl::Status RunGroup(absl::Span<const std::unique_ptr<Communicator>> group,
                      absl::FunctionRef<absl::Status(Communicator&)> body);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_RUN_GROUP_H_
