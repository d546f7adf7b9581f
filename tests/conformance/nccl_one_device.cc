// Ranks that are processes and share the first device. NCCL refuses that on one host: so each rank
// calls itself a host, and NCCL goes over sockets on the loopback interface.

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/nccl/nccl.h"
#include "evenkeel/tests/conformance/processes.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {
namespace {

std::vector<std::string> EnvironmentOf(int rank) {
  return {absl::StrCat("NCCL_HOSTID=evenkeel-rank-", rank), "NCCL_SOCKET_IFNAME=lo",
          "NCCL_IB_DISABLE=1"};
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeRank(int rank, int world_size,
                                                       std::unique_ptr<ControlLink> link,
                                                       const CommunicatorOptions& options) {
  return CreateNcclGroup(rank, world_size, std::move(link), {.device = 0, .communicator = options});
}

Missing MissingFor(int) {
  const GpuVerdict verdict = JudgeGpus(1);
  if (verdict.answer == GpuAnswer::kRun) return {};
  return {.sentence = verdict.sentence, .is_failure = verdict.answer == GpuAnswer::kFail};
}

}  // namespace

const TestedBackend& Tested() {
  static constexpr TestedBackend kNccl = {
      .name = "nccl_one_device",
      .finds_disagreement_at_once = true,
      .min_and_max_pass_nan_on = false,
      .run =
          [](int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
             const CommunicatorOptions& options) {
            return RunAsProcesses(world_size, body, options, MakeRank, EnvironmentOf);
          },
      .missing = MissingFor,
      .world_sizes =
          [] {
            return std::vector<int>{2, 4, 6};
          },
      .end_test = EndProcesses,
  };
  return kNccl;
}

}  // namespace evenkeel
