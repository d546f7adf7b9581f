// The properties that ranks compare before NCCL connects them, since NCCL would hang or report
// less.
//
//   NcclPeer mine{.version = api.version(), ...};
//   ... exchange Serialize() over the control plane ...
//   EK_RETURN_IF_ERROR(CheckPeers(all));       // the same answer on all ranks
//
// Errors: FailedPrecondition that names ranks: other versions of NCCL; two ranks on one device. The
//         latter is left to NCCL where a rank says NCCL_MULTI_RANK_GPU_ENABLE=1; and ranks that
//         call themselves other hosts (NCCL_HOSTID) have no device in common.

#ifndef EVENKEEL_COMM_NCCL_PEERS_H_
#define EVENKEEL_COMM_NCCL_PEERS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

struct NcclPeer {
  int version = 0;
  Device device;  // As that rank's process numbers them.
  NcclPlace place;

  std::string Serialize() const;
  static absl::StatusOr<NcclPeer> Parse(absl::string_view bytes);
};

absl::Status CheckPeers(const std::vector<NcclPeer>& peers);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_PEERS_H_
