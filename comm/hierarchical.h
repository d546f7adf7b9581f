// Ranks that are processes of several hosts: over shared memory inside each host, over TCP with Gloo between the hosts.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                       CreateHierarchicalGroup(rank, world_size, std::move(link), {.bind_address = "10.0.0.7"}));
//
// Most programs let comm/factory.h do this from the environment.
//
// Hosts:    the ranks tell each other which host they are on. One host for all: the group is one of comm/shm.h. No host
//           with two ranks: one of comm/gloo.h. Else the first rank of each host speaks for it, and what the ranks of a
//           host have in common crosses the link between two hosts once: of an all-reduce the sums of whole hosts.
//           Hosts may have different numbers of ranks, in any order.
// Groups:   Split() and Shrink() find the hosts of the new group's ranks anew, so a host may lose the rank that spoke
//           for it, or all.
// Sums:     in rank order within a host, rounded once there; then over the hosts as gloo.h says. So they depend on which
//           ranks share a host, not on timing, and are equal on all ranks. A scale of a sum is applied within the host,
//           so that float16 does not overflow between hosts; an average of integers is divided once.
// Messages: send and recv between ranks of one host go through its memory, others and all_to_all over TCP.
// Order:    each channel has a communication thread of its own, and those of Gloo on the ranks that speak for a host.
// Mismatch: found at once inside a host; between hosts as with Gloo.
// Peers, Errors, Memory: those of shm.h and of gloo.h. Allocate() gives memory that the host's ranks share.

#ifndef EVENKEEL_COMM_HIERARCHICAL_H_
#define EVENKEEL_COMM_HIERARCHICAL_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control.h"

namespace evenkeel {

struct HierarchicalOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  // Where this rank listens for those of other hosts while the group is made, as in gloo.h.
  std::string bind_address = "127.0.0.1";
  // Divides a host: only ranks of it that say the same share memory. For ranks on several sockets, and for tests.
  std::string part_of_host;
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have come here. `control` is connected and not started. A rank whose host can't be
// found out, or which can have no shared memory, counts as alone on its host.
// Errors: those of CreateGlooGroup() and CreateShmGroup(), without the one that ranks are on several hosts.
absl::StatusOr<std::unique_ptr<Communicator>> CreateHierarchicalGroup(int rank, int world_size,
                                                                      std::unique_ptr<ControlLink> control,
                                                                      const HierarchicalOptions& options = {});

// The whole group in this process, one communicator per rank, for tests and measurements. `parts`: part_of_host, by
// rank.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateHierarchicalGroupInProcess(
    const std::vector<std::string>& parts, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_HIERARCHICAL_H_
