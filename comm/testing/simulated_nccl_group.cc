#include "evenkeel/comm/testing/simulated_nccl_group.h"

#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr int kMostRanks = 8;

}  // namespace

std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ConnectSimulatedNccl(
    SimulatedDevices& devices, SimulatedNccl& nccl, int world_size, const NcclGroupOptions& options,
    std::vector<int> devices_of) {
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ranks(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      NcclGroupOptions mine = options;
      mine.device = devices_of.empty() ? rank : devices_of[rank];
      ranks[rank] = CreateNcclGroupOver(devices, &nccl.Library(rank), rank, world_size,
                                        std::move(links[rank]), mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedNcclGroup(
    SimulatedDevices& devices, SimulatedNccl& nccl, int world_size,
    const NcclGroupOptions& options) {
  std::vector<std::unique_ptr<Communicator>> group;
  for (absl::StatusOr<std::unique_ptr<Communicator>>& rank :
       ConnectSimulatedNccl(devices, nccl, world_size, options)) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, std::move(rank));
    group.push_back(std::move(comm));
  }
  return group;
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedNcclGroup(
    int world_size, const NcclGroupOptions& options) {
  static SimulatedDevices& devices = *new SimulatedDevices({.count = kMostRanks});
  static SimulatedNccl& nccl = *new SimulatedNccl(devices);
  return CreateSimulatedNcclGroup(devices, nccl, world_size, options);
}

}  // namespace evenkeel::internal
