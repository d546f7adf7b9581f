#include "evenkeel/comm/local.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/run_group.h"
#include "evenkeel/comm/local_backend.h"
#include "evenkeel/comm/local_link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(int world_size,
                                                                            CommunicatorOptions options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("CreateLocalGroup: a group of ", world_size, " ranks"));
  }
  std::vector<std::unique_ptr<Backend>> backends = internal::CreateLocalBackends(world_size);
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    auto control = std::make_unique<ControlChannel>(rank, world_size, std::move(links[rank]));
    group.push_back(std::make_unique<Communicator>(std::move(backends[rank]), std::move(control), options));
  }
  return group;
}

absl::Status RunRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                      CommunicatorOptions options) {
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group, CreateLocalGroup(world_size, options));
  return internal::RunGroup(group, body);
}

}  // namespace evenkeel
