// A group over NCCL, with any implementation of NCCL's interface and of the devices.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//          CreateNcclGroupOver(runtime, api, rank, world_size, std::move(link), {.device = rank}));
//
// comm/nccl/nccl.h has the contract of the group, and makes it over CUDA's devices and NCCL itself.

#ifndef EVENKEEL_COMM_NCCL_GROUP_H_
#define EVENKEEL_COMM_NCCL_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

struct NcclGroupOptions {
  std::string group = "world";
  int device = 0;
  std::string unique_id;  // Empty: rank 0 makes and spreads one.
  absl::Duration connect_timeout = absl::Minutes(2);
  // How long an abort waits for a call into NCCL, for NCCL, and for the device, before it leaves
  // them behind.
  absl::Duration abort_patience = absl::Seconds(10);
  // Allocate() registers memory of at least so many bytes with NCCL: it comes in pieces of 2 MiB.
  int64_t least_registered = int64_t{1} << 20;
  CommunicatorOptions communicator;
};

// Returns the device of a rank: the one whose number is the rank on the host. A process that sees a
// single device got it from its launcher (CUDA_VISIBLE_DEVICES for each rank); if not, CheckPeers()
// or NCCL reports that ranks share a device.
inline int NcclDeviceFor(int local_rank, int visible_devices) {
  return visible_devices == 1 ? 0 : local_rank;
}

// `runtime` and `api` outlive the group and its memory. If `api` is an error on any rank, all ranks
// return it.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroupOver(
    DeviceRuntime& runtime, absl::StatusOr<NcclApi*> api, int rank, int world_size,
    std::unique_ptr<ControlLink> control, const NcclGroupOptions& options = {});

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_GROUP_H_
