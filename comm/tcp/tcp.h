// A group of processes, on one host or several, over TCP.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
//                       TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                CreateTcpGroup(rank, world_size, std::move(link), {.bind_address = "10.0.0.7"}));
//
// Most programs use comm/factory.h, which reads the environment.
//
// Order:    each channel has a communication thread of its own, and so has each direction of each
//           pair of ranks within it (send, recv): none waits for another. One more thread reads and
//           writes for all of them.
// Sums:     equal bits on all ranks. The order of the additions depends on the element's position,
//           the size of the data and the world size, not on timing. 16-bit floats are
//           widened, added and rounded to nearest even: once where a rank adds the data of all
//           others (small data, up to 8 ranks), else at each addition. A scale is applied to
//           each rank's contribution before the sum, so that float16 does not overflow in between;
//           with min, max and product to the result.
// Peers:    each rank has one connection to each other rank. Both ends authenticate with a key
//           derived from the job's secret, which is never sent, before any data is sent. Listeners
//           drop all other connections without delay for the peers, and are closed once the group
//           is made. Data is not encrypted.
// Mismatch: the properties on which ranks must agree are hashed into the messages' tags, so
//           different collectives never pair. The control plane detects within seconds that they
//           wait for each other (comm/verify.h); with the level off they end at their deadline. A
//           message of an unexpected size is an error with both sizes.
// Errors:   the control plane names a lost rank, while a connection knows only its other end. So
//           "rank 2 closed its connection to rank 0" is reported only if the control plane reports
//           no failure within three seconds.
// Memory:   plain memory is sent in place. Coalesced operations and inputs that overlap the output
//           are copied once.

#ifndef EVENKEEL_COMM_TCP_TCP_H_
#define EVENKEEL_COMM_TCP_TCP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

struct TcpOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  // The address, a number or a name, at which this rank listens for the others while the group is
  // made. The loopback address is for ranks of one host; otherwise the other hosts must reach it.
  std::string bind_address = "127.0.0.1";
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have called it. `control` is connected and not started.
// Errors: InvalidArgument for an address of another host; DeadlineExceeded names the missing ranks;
//         Unavailable names a lost rank; PermissionDenied names two ranks whose secrets differ.
absl::StatusOr<std::unique_ptr<Communicator>> CreateTcpGroup(int rank, int world_size,
                                                             std::unique_ptr<ControlLink> control,
                                                             const TcpOptions& options = {});

// Makes the whole group in this process, one communicator per rank, for tests and measurements.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateTcpGroupInProcess(
    int world_size, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TCP_TCP_H_
