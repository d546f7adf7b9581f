#include "absl/status/status.h"
#include "evenkeel/comm/nccl/nccl_or_not.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclIfBuilt(
    const NcclRequest&, const std::function<absl::StatusOr<std::unique_ptr<ControlLink>>()>&) {
  return absl::UnimplementedError(
      "backend nccl is not in this build: install the CUDA toolkit and NCCL, set CUDA_HOME unless "
      "they are in "
      "/usr/local/cuda, and build again");
}

}  // namespace evenkeel::internal
