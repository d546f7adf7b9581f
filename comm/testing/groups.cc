#include "evenkeel/comm/testing/groups.h"

#include <utility>

#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"

namespace evenkeel::internal {

std::string ToString(Transport transport) {
  switch (transport) {
    case Transport::kLocal:
      return "local";
    case Transport::kBlind:
      return "blind";
    case Transport::kTcp:
      return "tcp";
  }
  return "unknown";
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGroupOver(
    Transport transport, const std::vector<CommunicatorOptions>& options) {
  if (transport == Transport::kTcp)
    return absl::UnimplementedError("tcp has the same options on all ranks");
  const int world_size = static_cast<int>(options.size());
  std::vector<std::unique_ptr<Backend>> backends =
      CreateLocalBackends(world_size, {.is_blind = transport == Transport::kBlind});
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    group.push_back(std::make_unique<Communicator>(
        std::move(backends[rank]),
        std::make_unique<ControlChannel>(rank, world_size, std::move(links[rank])), options[rank]));
  }
  return group;
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGroupOver(
    Transport transport, int world_size, const CommunicatorOptions& options) {
  if (transport == Transport::kTcp) return CreateTcpGroupInProcess(world_size, options);
  return CreateGroupOver(transport, std::vector<CommunicatorOptions>(world_size, options));
}

absl::Status RunRanksOver(Transport transport, int world_size,
                          absl::FunctionRef<absl::Status(Communicator&)> body,
                          const CommunicatorOptions& options) {
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group,
                      CreateGroupOver(transport, world_size, options));
  return RunGroup(group, body);
}

}  // namespace evenkeel::internal
