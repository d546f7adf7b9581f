// A group of threads of one process: for tests, for single-process use, and as the reference for
// all backends.
//
//   absl::Status status = RunRanks(4, [](Communicator& comm) -> absl::Status {
//     std::vector<float> data(5, comm.rank());
//     EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));   // 0 + 1 + 2 + 3
//     return absl::OkStatus();
//   });
//
// Each element is added in rank order, so results depend neither on timing nor on the split of
// tensors into operations. If two ranks issue different collectives at the same position of a
// channel, all ranks get an error with the positions at once.
//
// Threads: each communicator belongs to a rank; different ranks may use theirs at the same time.

#ifndef EVENKEEL_COMM_LOCAL_LOCAL_H_
#define EVENKEEL_COMM_LOCAL_LOCAL_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// Makes one communicator per rank. InvalidArgument unless world_size is at least 1.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(
    int world_size, CommunicatorOptions options = {});

// Runs `body` once per rank, each in a thread of its own, over a local group. A rank that returns
// OK finalizes; one that returns an error aborts the others. Returns OK, or the error of the rank
// that failed first, with its rank.
absl::Status RunRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                      CommunicatorOptions options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_LOCAL_LOCAL_H_
