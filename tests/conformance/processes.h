// The suite with a process per rank: each test's process is rank 0, and starts itself again for the
// others, which run the same test beside it and meet it in RunTested().
//
//   .run = [](int world_size, auto body, const CommunicatorOptions& options) {
//     return RunAsProcesses(world_size, body, options, MakeRank, EnvironmentOf);
//   },
//   .end_test = EndProcesses,
//
// So a test's ranks share nothing but the group: what its threads share otherwise is each process's
// own.
//
// EVENKEEL_CONFORMANCE_RANK, _STORE: which rank a process is, and where the group's store is.

#ifndef EVENKEEL_TESTS_CONFORMANCE_PROCESSES_H_
#define EVENKEEL_TESTS_CONFORMANCE_PROCESSES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

using RankMaker = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    int rank, int world_size, std::unique_ptr<ControlLink> link,
    const CommunicatorOptions& options)>;
// Returns variables that each process has in its environment before its code runs: "NAME=value".
using RankEnvironment = std::vector<std::string> (*)(int rank);

// This process's part.
absl::Status RunAsProcesses(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                            const CommunicatorOptions& options, const RankMaker& make,
                            RankEnvironment environment);
// Waits for the other processes of the test that ends, and fails it if one of them has failed.
void EndProcesses();

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CONFORMANCE_PROCESSES_H_
