#include "evenkeel/comm/testing/hosts.h"

#include <utility>

#include "absl/status/status.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/hierarchical/backend.h"
#include "evenkeel/comm/hierarchical/host_map.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/ranks/rank_names.h"

namespace evenkeel::internal {

Hosts SomeHosts(int world_size) {
  switch (world_size) {
    case 3:
      return {"a", "b", "a"};
    case 5:
      return {"a", "b", "a", "a", "b"};
    case 8:
      return {"a", "b", "c", "c", "a", "c", "b", "c"};
    default: {  // All on one, but for the last.
      Hosts hosts(world_size, "a");
      hosts.back() = "b";
      return hosts;
    }
  }
}

std::vector<std::unique_ptr<Backend>> CreateBackendsOnHosts(const Hosts& hosts,
                                                            const Wrap& wrap_between) {
  const HostMap map(hosts);
  std::vector<std::unique_ptr<Backend>> all(map.ranks()), between(map.hosts());
  std::vector<std::vector<std::unique_ptr<Backend>>> inside(map.hosts());
  if (map.hosts() > 1) all = CreateLocalBackends(map.ranks());
  if (map.hosts() > 1 && map.largest() > 1) {
    between = CreateLocalBackends(map.hosts(), {.names = RankNames(map.leaders())});
  }
  for (int host = 0; host < map.hosts(); ++host) {
    const size_t ranks = map.ranks_of(host).size();
    inside[host].resize(ranks);
    if (ranks > 1 || map.hosts() == 1) {
      inside[host] =
          CreateLocalBackends(static_cast<int>(ranks), {.names = RankNames(map.ranks_of(host))});
    }
  }
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < map.ranks(); ++rank) {
    const int host = map.host_of(rank);
    auto backend = std::make_unique<HierarchicalBackend>(rank);
    HierarchicalTransports transports;
    transports.inside = std::move(inside[host][map.place_of(rank)]);
    if (map.leader_of(host) == rank) transports.between = std::move(between[host]);
    if (transports.between != nullptr && wrap_between) {
      transports.between = wrap_between(std::move(transports.between));
    }
    transports.all = std::move(all[rank]);
    const absl::Status composed = backend->Compose(map, std::move(transports));
    if (!composed.ok()) backend->Abort(composed);
    backends.push_back(std::move(backend));
  }
  return backends;
}

std::vector<std::unique_ptr<Communicator>> CreateGroupOver(
    std::vector<std::unique_ptr<Backend>> backends, const CommunicatorOptions& options) {
  const int world_size = static_cast<int>(backends.size());
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    group.push_back(std::make_unique<Communicator>(
        std::move(backends[rank]),
        std::make_unique<ControlChannel>(rank, world_size, std::move(links[rank])), options));
  }
  return group;
}

std::vector<std::unique_ptr<Communicator>> CreateGroupOnHosts(const Hosts& hosts,
                                                              const CommunicatorOptions& options) {
  return CreateGroupOver(CreateBackendsOnHosts(hosts), options);
}

}  // namespace evenkeel::internal
