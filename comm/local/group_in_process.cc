#include "evenkeel/comm/local/group_in_process.h"

#include <thread>
#include <utility>

#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateInProcess(
    int world_size, absl::FunctionRef<absl::StatusOr<std::unique_ptr<Communicator>>(
                        int rank, std::unique_ptr<ControlLink> link)>
                        create) {
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> made(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { made[rank] = create(rank, std::move(links[rank])); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::unique_ptr<Communicator>> group;
  for (absl::StatusOr<std::unique_ptr<Communicator>>& one : made) {
    EK_RETURN_IF_ERROR(one.status());
    group.push_back(*std::move(one));
  }
  return group;
}

}  // namespace evenkeel::internal
