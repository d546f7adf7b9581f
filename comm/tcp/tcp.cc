#include "evenkeel/comm/tcp/tcp.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/make_group.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/backend.h"

namespace evenkeel {
namespace {

constexpr char kTopic[] = "tcp addresses";

// Sends all addresses to all ranks over the control plane, which names missing ranks, and connects.
absl::Status Connect(internal::TcpBackend& backend, Communicator& comm, const TcpOptions& options) {
  if (comm.world_size() == 1) return absl::OkStatus();
  ControlChannel& control = comm.control();
  EK_ASSIGN_OR_RETURN(
      const std::string mine,
      backend.Listen(options.bind_address, control.link().Key(absl::StrCat("tcp/", options.group)),
                     [&control](const absl::Status& why) { control.Fail(why); }));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts all,
                      internal::AwaitArrival(control, kTopic, mine,
                                             {options.group, options.connect_timeout,
                                              options.communicator.watch.warn}));
  return backend.Connect(all, options.connect_timeout);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateTcpGroup(int rank, int world_size,
                                                             std::unique_ptr<ControlLink> control,
                                                             const TcpOptions& options) {
  return internal::MakeGroup(
      "CreateTcpGroup", rank, world_size, std::move(control), options, CreateTcpGroup,
      std::make_unique<internal::TcpBackend>(rank, world_size, options.group, internal::RankNames(),
                                             options.communicator.watch.warn),
      Connect);
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateTcpGroupInProcess(
    int world_size, const CommunicatorOptions& options) {
  return internal::CreateInProcess(
      "CreateTcpGroupInProcess", world_size, [&](int rank, std::unique_ptr<ControlLink> link) {
        return CreateTcpGroup(rank, world_size, std::move(link), {.communicator = options});
      });
}

}  // namespace evenkeel
