#include "evenkeel/comm/local/group_in_process.h"

#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateInProcess(
    int world_size, absl::FunctionRef<absl::StatusOr<std::unique_ptr<Communicator>>(
                        int rank, std::unique_ptr<ControlLink> link)>
                        create) {
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> made(world_size);
  // The ranks meet each other, so none begins before all have their threads.
  Notification go;
  absl::Status started;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size && started.ok(); ++rank) {
    absl::StatusOr<std::thread> thread =
        StartThread(absl::StrCat("rank ", rank, " of a group in this process"), [&, rank] {
          go.WaitUntil(absl::InfiniteFuture());
          if (started.ok()) made[rank] = create(rank, std::move(links[rank]));
        });
    started = thread.status();
    if (thread.ok()) threads.push_back(*std::move(thread));
  }
  go.Notify();
  for (std::thread& thread : threads) thread.join();
  EK_RETURN_IF_ERROR(started);
  std::vector<std::unique_ptr<Communicator>> group;
  for (absl::StatusOr<std::unique_ptr<Communicator>>& one : made) {
    EK_RETURN_IF_ERROR(one.status());
    group.push_back(*std::move(one));
  }
  return group;
}

}  // namespace evenkeel::internal
