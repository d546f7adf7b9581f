#include "evenkeel/comm/internal/simulated_nccl_group.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  static constexpr TestedBackend kSimulated = {
      .name = "simulated_nccl",
      .finds_disagreement_at_once = true,
      .min_and_max_pass_nan_on = false,
      .create = [](int world_size, const CommunicatorOptions& options) -> absl::StatusOr<Group> {
        return internal::CreateSimulatedNcclGroup(world_size, {.communicator = options});
      },
  };
  return kSimulated;
}

}  // namespace evenkeel
