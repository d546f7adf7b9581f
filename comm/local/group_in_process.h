// All ranks of a group in this process: for backends whose ranks meet each other, so that each
// needs a thread meanwhile.
//
//   return CreateInProcess(world_size, [&](int rank, std::unique_ptr<ControlLink> link) {
//     return CreateTcpGroup(rank, world_size, std::move(link), options);
//   });

#ifndef EVENKEEL_COMM_LOCAL_GROUP_IN_PROCESS_H_
#define EVENKEEL_COMM_LOCAL_GROUP_IN_PROCESS_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel::internal {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateInProcess(
    int world_size, absl::FunctionRef<absl::StatusOr<std::unique_ptr<Communicator>>(
                        int rank, std::unique_ptr<ControlLink> link)>
                        create);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_GROUP_IN_PROCESS_H_
