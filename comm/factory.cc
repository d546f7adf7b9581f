#include "evenkeel/comm/factory.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/hierarchical/hierarchical.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/make_group.h"
#include "evenkeel/comm/nccl/nccl_or_not.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/shm/registered_memory.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "evenkeel/comm/waiting.h"

namespace evenkeel {
namespace {

// The link to the control hub of the group, and the local address of the route to it.
struct Route {
  std::unique_ptr<ControlLink> link;
  std::string local_host = "127.0.0.1";
};

absl::StatusOr<Route> Connect(const Environment& environment, const FactoryOptions& options,
                              absl::Duration timeout) {
  Route route;
  if (environment.world_size == 1) {
    route.link = std::move(internal::CreateLocalLinks(1)[0]);
    return route;
  }
  std::shared_ptr<Rendezvous> rendezvous = options.rendezvous;
  if (rendezvous == nullptr) {
    EK_ASSIGN_OR_RETURN(rendezvous, Rendezvous::Join(environment, timeout));
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
                      rendezvous->OpenGroup({.name = options.group,
                                             .members = options.members,
                                             .incarnation = environment.newcomer}));
  route.local_host = environment.address.empty() ? link->local_host() : environment.address;
  route.link = std::move(link);
  return route;
}

using Made = absl::StatusOr<std::unique_ptr<Communicator>>;
// Makes a group of one backend. `environment` has the rank and the size in it.
using MakeFunction = Made (*)(const Environment& environment, Route route,
                              const FactoryOptions& options);

Made MakeTcp(const Environment& environment, Route route, const FactoryOptions& options) {
  return CreateTcpGroup(environment.rank, environment.world_size, std::move(route.link),
                        {.group = options.group,
                         .bind_address = route.local_host,
                         .connect_timeout = options.connect_timeout,
                         .communicator = options.communicator});
}

Made MakeShm(const Environment& environment, Route route, const FactoryOptions& options) {
  return CreateShmGroup(environment.rank, environment.world_size, std::move(route.link),
                        {.group = options.group,
                         .connect_timeout = options.connect_timeout,
                         .communicator = options.communicator});
}

// Chooses by the hosts of the ranks: shm, tcp, or one inside and the other between hosts.
Made MakeHierarchical(const Environment& environment, Route route, const FactoryOptions& options) {
  const int parts = environment.host_parts;
  return CreateHierarchicalGroup(
      environment.rank, environment.world_size, std::move(route.link),
      {.group = options.group,
       .bind_address = route.local_host,
       .part_of_host = parts == 1 ? "" : absl::StrCat(environment.local_rank % parts),
       .connect_timeout = options.connect_timeout,
       .communicator = options.communicator});
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNccl(const Environment& environment,
                                                         const FactoryOptions& options) {
  return internal::CreateNcclIfBuilt(
      {.rank = environment.rank,
       .world_size = environment.world_size,
       .local_rank = environment.local_rank,
       .group = options.group,
       .connect_timeout = options.connect_timeout,
       .communicator = options.communicator},
      [&]() -> absl::StatusOr<std::unique_ptr<ControlLink>> {
        EK_ASSIGN_OR_RETURN(Route route, Connect(environment, options, options.connect_timeout));
        return std::move(route.link);
      });
}

// The backend of a group that moves no data.
class NoBackend final : public Backend {
 public:
  absl::string_view name() const override { return "none"; }
  absl::Status Supports(const Collective&) const override { return kRefusal; }
  void Start(Operation, std::shared_ptr<WorkState> work) override { work->Finish(kRefusal); }
  void Abort(const absl::Status&) override {}

 private:
  const absl::Status kRefusal = absl::UnimplementedError(
      "backend none has a control plane alone, and moves no data: choose auto");
};

absl::StatusOr<std::unique_ptr<Communicator>> MakeNoneOver(int rank, int world_size,
                                                           std::unique_ptr<ControlLink> link,
                                                           const FactoryOptions& options) {
  return internal::MakeGroup(
      "the backend none", rank, world_size, std::move(link), options, MakeNoneOver,
      std::make_unique<NoBackend>(),
      [](NoBackend&, Communicator& comm, const FactoryOptions& options) {
        return internal::AwaitArrival(
                   comm.control(), "arrival", "",
                   {options.group, options.connect_timeout, options.communicator.watch.warn})
            .status();
      });
}

Made MakeNone(const Environment& environment, Route route, const FactoryOptions& options) {
  return MakeNoneOver(environment.rank, environment.world_size, std::move(route.link), options);
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateLocal(const Environment& environment,
                                                          const FactoryOptions& options) {
  if (environment.world_size > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("backend local is for ranks that are threads of one process; ",
                     "this job has ", environment.world_size, " processes: choose auto"));
  }
  EK_ASSIGN_OR_RETURN(auto group, CreateLocalGroup(1, options.communicator));
  return std::move(group[0]);
}

// Returns the function for a backend; null for one that is made in another way.
MakeFunction MakeFunctionOf(absl::string_view backend) {
  if (backend == "auto" || backend == "hierarchical") return MakeHierarchical;
  if (backend == "tcp" || backend == "gloo") return MakeTcp;
  if (backend == "shm") return MakeShm;
  if (backend == "none") return MakeNone;
  return nullptr;
}

// Makes the communicator of a newcomer. Its group is made when it enters.
Made CreateWaiting(const Environment& environment, const FactoryOptions& options,
                   MakeFunction make) {
  if (make == nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        "EVENKEEL_NEWCOMER: a lost rank of the backend ", options.backend,
        " is not replaced; that is for auto, shm, tcp and hierarchical: restart the job"));
  }
  const auto local_host = std::make_shared<std::string>();
  internal::WaitingOptions waiting{.group = options.group, .communicator = options.communicator};
  waiting.open_link = [environment, options, local_host](
                          absl::Duration timeout) -> absl::StatusOr<std::unique_ptr<ControlLink>> {
    EK_ASSIGN_OR_RETURN(Route route, Connect(environment, options, timeout));
    *local_host = route.local_host;
    return std::move(route.link);
  };
  waiting.make_group = [environment, options, make, local_host](
                           absl::string_view group, int rank, int world_size,
                           std::unique_ptr<ControlLink> link, absl::Duration timeout) {
    Environment next = environment;
    next.rank = rank;
    next.world_size = world_size;
    FactoryOptions its = options;
    its.group = std::string(group);
    its.connect_timeout = timeout;
    return make(next, {std::move(link), *local_host}, its);
  };
  if (make != MakeTcp && make != MakeNone) waiting.allocate = internal::AllocateRegistered;
  return internal::MakeWaiting(environment.rank, environment.world_size, std::move(waiting));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateCommunicator(const Environment& environment,
                                                                 const FactoryOptions& given) {
  // The program's options take precedence over the environment.
  FactoryOptions options = given;
  if (!options.communicator.verify.has_value()) options.communicator.verify = environment.verify;
  if (options.communicator.flight.folder.empty())
    options.communicator.flight.folder = environment.flight_folder;
  if (environment.newcomer > 0 && environment.world_size > 1)
    return CreateWaiting(environment, options, MakeFunctionOf(options.backend));
  if (options.backend == "local" || (options.backend == "auto" && environment.world_size == 1))
    return CreateLocal(environment, options);
  if (options.backend == "nccl") return CreateNccl(environment, options);
  const MakeFunction make = MakeFunctionOf(options.backend);
  if (make != nullptr) {
    EK_ASSIGN_OR_RETURN(Route route, Connect(environment, options, options.connect_timeout));
    return make(environment, std::move(route), options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown backend \"", options.backend,
                   "\": it is one of auto, shm, tcp (or gloo), hierarchical, nccl, local, none"));
}

}  // namespace evenkeel
