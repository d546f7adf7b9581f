// The client's side of connecting to a store: finds it, connects, and authenticates.
//
//   EK_ASSIGN_OR_RETURN(Greeted greeted, Greet(find, {.rank = 1, .world_size = 4}, job, deadline));
//
// It retries at growing intervals until the deadline: a store may not have started yet, its address
// may not be written yet, or another job's store may be at the same address. A refusal by the job's
// own store, which proves that it has the secret, is final. A refusal without proof may come from
// any program of the host: it is logged at once, the next addresses are tried, and for 5 seconds
// the same one again. A server that begins the handshake and does not end it keeps its connection
// while the others are tried. A rank that has found no store after 5 seconds logs it, once.

#ifndef EVENKEEL_COMM_NET_GREET_H_
#define EVENKEEL_COMM_NET_GREET_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

// Returns the current candidate addresses of the store; empty: none yet. Called before each
// attempt; an error is final.
using FindServer = std::function<absl::StatusOr<std::vector<HostPort>>()>;

// Known to both sides.
struct JobSecret {
  std::string job;  // Empty: any job.
  std::string secret;
  std::string host = {};  // The store's host, for messages: "rank 0".
};

// A connection whose two ends have proved to each other that they have the secret.
struct Greeted {
  UniqueFd fd;
  FrameParser received{kMaxLinkFrame};  // May contain the first bytes already.
  HostPort server;
  std::string host;  // The process that hosts the store: "rank 0".
  HostPort local;    // This end.
};

// `hello` comes without nonce and proof. An error of `cancelled` is final.
// Errors: DeadlineExceeded with the address and the last obstacle; else the store's reply:
// PermissionDenied for a wrong secret, InvalidArgument for a wrong rank or world size,
// FailedPrecondition for another version or build.
absl::StatusOr<Greeted> Greet(const FindServer& find, const Hello& hello, const JobSecret& job,
                              absl::Time deadline, const Cancelled& cancelled = nullptr);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_GREET_H_
