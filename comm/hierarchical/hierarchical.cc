#include "evenkeel/comm/hierarchical/hierarchical.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/hierarchical/backend.h"
#include "evenkeel/comm/hierarchical/host_map.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/make_group.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/shm/backend.h"
#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/mesh.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/backend.h"

namespace evenkeel {
namespace {

using internal::HostMap;

std::string HostOf(int rank, const std::string& part) {
  const absl::StatusOr<std::string> identity = internal::HostIdentity();
  // A container may forbid shared memory, or have none to spare. Once it has worked, it is not
  // tried again: a later group that lacks memory fails with that error.
  static std::atomic<bool> has_shared = false;
  const bool can_share = identity.ok() && (has_shared || internal::ShmBoard::CreateMemory(1).ok());
  has_shared = has_shared || can_share;
  return can_share ? absl::StrCat(*identity, "\n", part) : absl::StrCat("of rank ", rank, " alone");
}

// The addresses at which a rank's transports listen; empty: it lacks that transport.
struct Addresses {
  std::string inside, between, all;

  static void VisitFields(auto& self, auto& visit) { visit(self.inside, self.between, self.all); }
};

// This rank's halves of the groups that the hosts ask for.
class Transports {
 public:
  Transports(int rank, const HostMap& map, const HierarchicalOptions& options)
      : host_(map.host_of(rank)), map_(map), options_(options) {
    const bool leads = map.leader_of(host_) == rank;
    const internal::WarnFunction& warn = options.communicator.watch.warn;
    if (peers().size() > 1 || map.hosts() == 1) {
      inside_ = Own(owned_.inside, std::make_unique<internal::ShmBackend>(
                                       map.place_of(rank), static_cast<int>(peers().size()),
                                       InsideName(), internal::RankNames(peers())));
    }
    if (leads && map.hosts() > 1 && map.largest() > 1) {
      between_ = Own(owned_.between, std::make_unique<internal::TcpBackend>(
                                         host_, map.hosts(), BetweenName(),
                                         internal::RankNames(map.leaders()), warn));
    }
    if (map.hosts() > 1) {
      all_ = Own(owned_.all, std::make_unique<internal::TcpBackend>(
                                 rank, map.ranks(), options.group, internal::RankNames(), warn));
    }
  }

  // To be given to the backend before Connect(), so that an abort ends that.
  internal::HierarchicalTransports Take() { return std::move(owned_); }

  // `control` outlives the transports.
  absl::StatusOr<Addresses> Listen(ControlChannel& control) {
    const ControlLink& link = control.link();
    const auto on_lost = [&control](const absl::Status& why) { control.Fail(why); };
    Addresses mine;
    if (inside_ != nullptr && peers().size() > 1) {
      EK_ASSIGN_OR_RETURN(mine.inside,
                          inside_->Listen(link.Key(absl::StrCat("shm/", InsideName()))));
    }
    if (between_ != nullptr) {
      EK_ASSIGN_OR_RETURN(mine.between,
                          between_->Listen(options_.bind_address,
                                           link.Key(absl::StrCat("tcp/", BetweenName())), on_lost));
    }
    if (all_ != nullptr) {
      EK_ASSIGN_OR_RETURN(mine.all,
                          all_->Listen(options_.bind_address,
                                       link.Key(absl::StrCat("tcp/", options_.group)), on_lost));
    }
    return mine;
  }

  absl::Status Connect(const std::vector<Addresses>& addresses, absl::Time deadline) {
    std::vector<std::string> inside, between, all;
    for (int rank : peers()) inside.push_back(addresses[rank].inside);
    for (int rank : map_.leaders()) between.push_back(addresses[rank].between);
    for (const Addresses& one : addresses) all.push_back(one.all);
    // In one order on all ranks, so that no two ranks wait for each other.
    if (all_ != nullptr) EK_RETURN_IF_ERROR(all_->Connect(all, deadline - SteadyNow()));
    if (between_ != nullptr) EK_RETURN_IF_ERROR(between_->Connect(between, deadline - SteadyNow()));
    return inside_ == nullptr ? absl::OkStatus() : inside_->Connect(inside, deadline - SteadyNow());
  }

 private:
  const std::vector<int>& peers() const { return map_.ranks_of(host_); }
  std::string InsideName() const {
    return absl::StrCat(options_.group, "/host of rank ", map_.leader_of(host_));
  }
  std::string BetweenName() const { return absl::StrCat(options_.group, "/between hosts"); }

  template <typename T>
  static T* Own(std::unique_ptr<Backend>& owner, std::unique_ptr<T> backend) {
    T* const made = backend.get();
    owner = std::move(backend);
    return made;
  }

  const int host_;
  const HostMap& map_;
  const HierarchicalOptions& options_;
  internal::HierarchicalTransports owned_;
  internal::ShmBackend* inside_ = nullptr;
  internal::TcpBackend* between_ = nullptr;
  internal::TcpBackend* all_ = nullptr;
};

absl::Status Connect(internal::HierarchicalBackend& backend, Communicator& comm,
                     const HierarchicalOptions& options) {
  const absl::Time deadline = SteadyNow() + options.connect_timeout;
  ControlChannel& control = comm.control();
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts hosts,
      internal::AwaitArrival(
          control, "hosts", HostOf(comm.rank(), options.part_of_host),
          {options.group, options.connect_timeout, options.communicator.watch.warn}));
  const HostMap map(hosts);
  Transports transports(comm.rank(), map, options);
  EK_RETURN_IF_ERROR(backend.Compose(map, transports.Take()));
  EK_ASSIGN_OR_RETURN(const Addresses mine, transports.Listen(control));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      internal::AwaitArrival(control, "addresses", internal::ToBytes(mine),
                                             {options.group, deadline - SteadyNow(),
                                              options.communicator.watch.warn}));
  std::vector<Addresses> addresses;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(Addresses one, internal::FromBytes<Addresses>(part, "a rank's addresses"));
    addresses.push_back(std::move(one));
  }
  return transports.Connect(addresses, deadline);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateHierarchicalGroup(
    int rank, int world_size, std::unique_ptr<ControlLink> control,
    const HierarchicalOptions& options) {
  return internal::MakeGroup("CreateHierarchicalGroup", rank, world_size, std::move(control),
                             options, CreateHierarchicalGroup,
                             std::make_unique<internal::HierarchicalBackend>(rank), Connect);
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateHierarchicalGroupInProcess(
    const std::vector<std::string>& parts, const CommunicatorOptions& options) {
  const int world_size = static_cast<int>(parts.size());
  return internal::CreateInProcess("CreateHierarchicalGroupInProcess", world_size,
                                   [&](int rank, std::unique_ptr<ControlLink> link) {
                                     return CreateHierarchicalGroup(
                                         rank, world_size, std::move(link),
                                         {.part_of_host = parts[rank], .communicator = options});
                                   });
}

}  // namespace evenkeel
