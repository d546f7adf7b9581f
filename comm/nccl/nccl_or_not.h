// NCCL where the build has it.

#ifndef EVENKEEL_COMM_NCCL_NCCL_OR_NOT_H_
#define EVENKEEL_COMM_NCCL_NCCL_OR_NOT_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel::internal {

struct NcclRequest {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string group = "world";
  absl::Duration connect_timeout;
  CommunicatorOptions communicator;
};

// `connect` is called once it is clear that this host has a device. Unimplemented in a build
// without NCCL.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclIfBuilt(
    const NcclRequest& request,
    const std::function<absl::StatusOr<std::unique_ptr<ControlLink>>()>& connect);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_NCCL_OR_NOT_H_
