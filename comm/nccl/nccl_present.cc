#include <utility>

#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/nccl/nccl.h"
#include "evenkeel/comm/nccl/nccl_or_not.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclIfBuilt(
    const NcclRequest& request,
    const std::function<absl::StatusOr<std::unique_ptr<ControlLink>>()>& connect) {
  EK_ASSIGN_OR_RETURN(const int devices, CudaDeviceCount());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ControlLink> link, connect());
  return CreateNcclGroup(request.rank, request.world_size, std::move(link),
                         {.group = request.group,
                          .device = NcclDeviceFor(request.local_rank, devices),
                          .connect_timeout = request.connect_timeout,
                          .communicator = request.communicator});
}

}  // namespace evenkeel::internal
