// Groups whose ranks are threads and whose tensors lie on simulated devices: what NCCL's are to
// CUDA, for tests.
//
//   SimulatedDevices devices({.count = 4});
//   EK_ASSIGN_OR_RETURN(auto group, CreateSimulatedGroup(devices, /*world_size=*/4));
//   absl::Status status = RunGroup(group, [](Communicator& comm) -> absl::Status {
//     EK_ASSIGN_OR_RETURN(Stream stream, comm.runtime()->CreateStream(comm.device()));
//     ...
//   });
//
// Rank r is on device r modulo the number of devices. A collective begins on a stream of its
// channel, after what it is to follow, moves data as a local group does (each element added in rank
// order), and streams that are ordered behind it wait without the host. As with NCCL nothing tells
// whether a pair is one (Backend::checks_pairs()), so reducers compare what was issued.
//
// Threads:   as Communicator says.
// Ownership: the devices outlive the group.

#ifndef EVENKEEL_COMM_TESTING_SIMULATED_GROUP_H_
#define EVENKEEL_COMM_TESTING_SIMULATED_GROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"

namespace evenkeel::internal {

struct SimulatedGroupOptions {
  CommunicatorOptions comm;
  // Different collectives of equal size complete, with garbage, as with a transport without
  // headers.
  bool is_blind = false;
  // Grows when a thread waits for an operation that has not ended: beside
  // DeviceRuntime::host_waits(), what the host waits for a device. Outlives the group.
  std::atomic<int64_t>* work_waits = nullptr;
};

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedGroup(
    SimulatedDevices& devices, int world_size, const SimulatedGroupOptions& options = {});

// As RunRanks() of comm/local/local.h.
absl::Status RunSimulatedRanks(SimulatedDevices& devices, int world_size,
                               absl::FunctionRef<absl::Status(Communicator&)> body,
                               const SimulatedGroupOptions& options = {});

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_SIMULATED_GROUP_H_
