// A group of processes on several hosts: over shared memory inside each host, over TCP with Gloo
// between the hosts.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
//                       TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//        CreateHierarchicalGroup(rank, world_size, std::move(link), {.bind_address = "10.0.0.7"}));
//
// Most programs use comm/factory.h, which reads the environment.
//
// Hosts:    the ranks exchange their hosts. If all are on one host, the group is that of
//           comm/shm/shm.h; if no host has two ranks, that of comm/tcp/tcp.h. Else the first rank
//           of each host is its leader, and data common to a host crosses each link between hosts
//           once: in an all-reduce the sums of whole hosts. Hosts may have different numbers of
//           ranks, in any order.
// Groups:   Split() and Shrink() determine the hosts of the new group again, so a host may lose its
//           leader, or all its ranks.
// Sums:     in rank order within a host, rounded once there; then over the hosts as in tcp.h. So
//           they depend on which ranks share a host, not on timing, and are equal on all ranks. The
//           scale of a sum is applied within the host, so that float16 does not overflow between
//           hosts.
// Messages: send and recv between ranks of one host use its memory, others, all_to_all and
//           all_to_all_v use TCP.
// Order:    each channel has a communication thread of its own, and on leaders those of Gloo.
// Mismatch: detected at once inside a host, and between hosts as with Gloo.
// Peers, errors and memory are those of shm.h and tcp.h. Allocate() returns memory that the ranks
// of the host share.

#ifndef EVENKEEL_COMM_HIERARCHICAL_HIERARCHICAL_H_
#define EVENKEEL_COMM_HIERARCHICAL_HIERARCHICAL_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

struct HierarchicalOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  // The address at which this rank listens for other hosts while the group is made, as in tcp.h.
  std::string bind_address = "127.0.0.1";
  // Divides a host: only its ranks with equal values share memory. For ranks on several sockets,
  // and for tests.
  std::string part_of_host;
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have called it. `control` is connected and not started.
// A rank whose host is unknown, or that cannot share memory, counts as alone on its host.
// Errors: those of CreateTcpGroup() and CreateShmGroup(), except that ranks may be on several
// hosts.
absl::StatusOr<std::unique_ptr<Communicator>> CreateHierarchicalGroup(
    int rank, int world_size, std::unique_ptr<ControlLink> control,
    const HierarchicalOptions& options = {});

// Makes the whole group in this process, one communicator per rank, for tests and measurements.
// `parts`: part_of_host, by rank.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateHierarchicalGroupInProcess(
    const std::vector<std::string>& parts, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_HIERARCHICAL_HIERARCHICAL_H_
