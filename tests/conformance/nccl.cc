// Ranks that are threads of this process, each on a device of its own.

#include "evenkeel/comm/nccl/nccl.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {
namespace {

absl::StatusOr<Group> Create(int world_size, const CommunicatorOptions& options) {
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world_size);
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ranks(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      ranks[rank] = CreateNcclGroup(rank, world_size, std::move(links[rank]),
                                    {.device = rank, .communicator = options});
    });
  }
  for (std::thread& thread : threads) thread.join();
  Group group;
  for (auto& rank : ranks) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, std::move(rank));
    group.push_back(std::move(comm));
  }
  return group;
}

// 1, 2, and as many as there are devices.
std::vector<int> Sizes() {
  std::set<int> sizes = {1, 2};
  const absl::StatusOr<int> devices = GpusForTest();
  if (devices.ok()) sizes.insert(std::max(1, *devices));
  return {sizes.begin(), sizes.end()};
}

Missing MissingFor(int world_size) {
  const GpuVerdict verdict = JudgeGpus(world_size);
  if (verdict.answer == GpuAnswer::kRun) return {};
  return {.sentence = verdict.sentence, .is_failure = verdict.answer == GpuAnswer::kFail};
}

}  // namespace

const TestedBackend& Tested() {
  static constexpr TestedBackend kNccl = {
      .name = "nccl",
      .finds_disagreement_at_once = true,
      .min_and_max_pass_nan_on = false,
      .create = Create,
      .missing = MissingFor,
      .world_sizes = Sizes,
  };
  return kNccl;
}

}  // namespace evenkeel
