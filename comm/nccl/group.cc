#include "evenkeel/comm/nccl/group.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/nccl/backend.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroupOver(
    DeviceRuntime& runtime, absl::StatusOr<NcclApi*> api, int rank, int world_size,
    std::unique_ptr<ControlLink> control, const NcclGroupOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat("CreateNcclGroup: rank ", rank,
                                                   " is out of range for ", world_size, " ranks"));
  }
  auto channel = std::make_unique<ControlChannel>(rank, world_size, std::move(control));
  absl::StatusOr<std::unique_ptr<NcclBackend>> made =
      NcclBackend::Create(runtime, api, rank, world_size, options);
  if (!made.ok()) {
    channel->Fail(AsErrorOf(rank, made.status()));
    return made.status();
  }
  NcclBackend& backend = **made;
  // Made before the ranks are connected, so that a rank that is lost meanwhile ends the wait.
  auto comm = std::make_unique<Communicator>(
      *std::move(made), std::move(channel), options.communicator, options.group,
      [&runtime, api, options](absl::string_view group, int next_rank, int next_world_size,
                               std::unique_ptr<ControlLink> link, absl::Duration timeout) {
        NcclGroupOptions next = options;
        next.group = std::string(group);
        next.connect_timeout = timeout;
        next.unique_id.clear();  // Good for one group.
        return CreateNcclGroupOver(runtime, api, next_rank, next_world_size, std::move(link), next);
      });
  const absl::Status connected = backend.Connect(comm->control());
  if (connected.ok()) return comm;
  // An error that all ranks found alike names them all.
  const bool is_everybodys = absl::IsFailedPrecondition(connected);
  comm->Abort(is_everybodys ? connected : AsErrorOf(rank, connected),
              "could not connect the group");
  return is_everybodys ? connected : comm->status();
}

}  // namespace evenkeel::internal
