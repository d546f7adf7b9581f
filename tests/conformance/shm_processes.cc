// Ranks that are processes, over shared memory: how nccl_one_device.cc's are, where there is no
// device.

#include <string>
#include <utility>
#include <vector>

#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/tests/conformance/processes.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {
namespace {

absl::StatusOr<std::unique_ptr<Communicator>> MakeRank(int rank, int world_size,
                                                       std::unique_ptr<ControlLink> link,
                                                       const CommunicatorOptions& options) {
  return CreateShmGroup(rank, world_size, std::move(link), {.communicator = options});
}

}  // namespace

const TestedBackend& Tested() {
  static constexpr TestedBackend kShm = {
      .name = "shm_processes",
      .adds_in_rank_order = true,
      .finds_disagreement_at_once = true,
      .run =
          [](int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
             const CommunicatorOptions& options) {
            return RunAsProcesses(world_size, body, options, MakeRank,
                                  [](int) { return std::vector<std::string>{}; });
          },
      .world_sizes =
          [] {
            return std::vector<int>{1, 3};
          },
      .end_test = EndProcesses,
  };
  return kShm;
}

}  // namespace evenkeel
