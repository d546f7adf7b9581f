#include "evenkeel/comm/nccl/nccl.h"

#include <utility>

#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/nccl/library.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<int> CudaDeviceCount() { return CudaDevices().DeviceCount(); }

absl::StatusOr<std::string> MakeNcclUniqueId() {
  EK_RETURN_IF_ERROR(CudaDeviceCount().status());
  EK_ASSIGN_OR_RETURN(internal::NcclApi* const nccl, internal::NcclLibrary());
  std::string id;
  EK_RETURN_IF_ERROR(internal::ToStatus("ncclGetUniqueId", nccl->GetUniqueId(&id)));
  return id;
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroup(int rank, int world_size,
                                                              std::unique_ptr<ControlLink> control,
                                                              const NcclOptions& options) {
  return internal::CreateNcclGroupOver(CudaDevices(), internal::NcclLibrary(), rank, world_size,
                                       std::move(control),
                                       {.group = options.group,
                                        .device = options.device,
                                        .unique_id = options.unique_id,
                                        .connect_timeout = options.connect_timeout,
                                        .communicator = options.communicator});
}

}  // namespace evenkeel
