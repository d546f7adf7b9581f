// The properties that ranks compare before NCCL connects them, since NCCL would hang or report
// less.
//
//   NcclPeer mine{.version = api.version(), ...};
//   ... exchange ToBytes(mine) over the control plane ...
//   EK_RETURN_IF_ERROR(CheckPeers(all));       // the same result on all ranks
//
// Errors: FailedPrecondition, which names ranks: versions of NCCL differ, or two ranks are on one
//         device. The latter is left to NCCL where a rank sets NCCL_MULTI_RANK_GPU_ENABLE=1; ranks
//         with different NCCL_HOSTID have no device in common.
// Threads: a pure function.

#ifndef EVENKEEL_COMM_NCCL_PEERS_H_
#define EVENKEEL_COMM_NCCL_PEERS_H_

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

struct NcclPeer {
  int version = 0;
  int device = 0;  // The number of its GPU in that rank's process.
  NcclPlace place;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.version, self.device, self.place.host, self.place.device,
          self.place.may_share_device);
  }
};

absl::Status CheckPeers(const std::vector<NcclPeer>& peers);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_PEERS_H_
