// Ranks that are processes, on one host or several, over TCP with Gloo.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                       CreateGlooGroup(rank, world_size, std::move(link), {.bind_address = "10.0.0.7"}));
//
// Most programs let comm/factory.h do this from the environment.
//
// Order:    each channel has a communication thread of its own, and so has each direction of each pair of ranks within
//           it (send, recv): none waits for another one. One more thread reads and writes for all of them.
// Sums:     Gloo's ring adds in an order that depends on the element's place and the world size, not on timing. 16-bit
//           floats are widened, added and rounded to nearest even at each of the world_size - 1 additions. A scale is
//           applied to what each rank contributes, before the sum, so that float16 does not overflow in between; with
//           min, max and product to the result.
// Peers:    each rank has one connection to each other one, over a transport of our own under Gloo's algorithms. Both
//           ends prove who they are with a key from the job's secret, which is never sent, before a byte of data goes
//           over it. Whoever else comes to a listener is let go and holds up nobody; nobody listens once the group is
//           made. What is sent is not encrypted.
// Mismatch: what ranks must agree on is hashed into the messages' tags, so different collectives never pair. That they
//           wait for each other is found out over the control plane within seconds (comm/verify.h); with the level off
//           they end at their deadline. A message of another size than what it meets is an error that names both.
// Errors:   when a rank is lost, the control plane names it; a connection knows its other end only. So that rank 2
//           closed its connection to rank 0 is reported only if the control plane has nothing to say for two seconds.
// Memory:   plain memory is sent as it lies. Coalesced operations and inputs that overlap the output are copied once.

#ifndef EVENKEEL_COMM_GLOO_H_
#define EVENKEEL_COMM_GLOO_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control.h"

namespace evenkeel {

struct GlooOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  // Where this rank listens for the others while the group is made, and what it tells them. The loopback address serves
  // ranks of one host; between hosts it must be one that the other hosts reach, a number or a name.
  std::string bind_address = "127.0.0.1";
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have come here. `control` is connected and not started.
// Errors: InvalidArgument for an address that is not this host's; DeadlineExceeded names the ranks that have not come;
//         Unavailable names a rank that was lost; PermissionDenied names two ranks whose secrets differ.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooGroup(int rank, int world_size,
                                                              std::unique_ptr<ControlLink> control,
                                                              const GlooOptions& options = {});

// The whole group in this process, one communicator per rank, for tests and measurements.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGlooGroupInProcess(
    int world_size, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_GLOO_H_
