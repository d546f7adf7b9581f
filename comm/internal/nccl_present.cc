#include <utility>

#include "evenkeel/comm/internal/nccl_or_not.h"
#include "evenkeel/comm/nccl.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclIfBuilt(
    const NcclRequest& request, const std::function<absl::StatusOr<std::unique_ptr<ControlLink>>()>& connect) {
  EK_RETURN_IF_ERROR(CudaDeviceCount().status());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ControlLink> link, connect());
  return CreateNcclGroup(
      request.rank, request.world_size, std::move(link),
      {.device = request.local_rank, .connect_timeout = request.connect_timeout, .communicator = request.communicator});
}

}  // namespace evenkeel::internal
