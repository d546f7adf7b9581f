// Groups over the simulated NCCL, with a device for each rank, for tests and the conformance suite.
//
//   EK_ASSIGN_OR_RETURN(auto group, CreateSimulatedNcclGroup(/*world_size=*/4));
//   absl::Status status = RunGroup(group, [](Communicator& comm) { return comm.Barrier(); });
//
// Threads: as Communicator says.

#ifndef EVENKEEL_COMM_TESTING_SIMULATED_NCCL_GROUP_H_
#define EVENKEEL_COMM_TESTING_SIMULATED_NCCL_GROUP_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"

namespace evenkeel::internal {

// Returns the result of each rank's own creation; rank r on device r, unless `devices_of` says
// otherwise. `options.device` is not read.
std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ConnectSimulatedNccl(
    SimulatedDevices& devices, SimulatedNccl& nccl, int world_size,
    const NcclGroupOptions& options = {}, std::vector<int> devices_of = {});

// All ranks' or the first error.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedNcclGroup(
    SimulatedDevices& devices, SimulatedNccl& nccl, int world_size,
    const NcclGroupOptions& options = {});

// On devices that live as long as the process.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedNcclGroup(
    int world_size, const NcclGroupOptions& options = {});

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_SIMULATED_NCCL_GROUP_H_
