// The client's side of meeting a store: find it, connect, prove who you are.
//
//   EK_ASSIGN_OR_RETURN(Greeted greeted, Greet(find, {.rank = 1, .world_size = 4}, job, deadline));
//
// Attempts go on, further and further apart, until the deadline: a store that has not started yet, an address that is
// not written yet, another job's store at the same place. A refusal by the job's own store is final. A rank that has
// found none after 5 seconds logs it, once.

#ifndef EVENKEEL_COMM_INTERNAL_GREET_H_
#define EVENKEEL_COMM_INTERNAL_GREET_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/frame.h"
#include "evenkeel/comm/internal/handshake.h"
#include "evenkeel/comm/internal/socket.h"

namespace evenkeel::internal {

// Where the store may be now; empty: nowhere yet. Asked again before each attempt, an error is final.
using FindServer = std::function<absl::StatusOr<std::vector<HostPort>>()>;

// What both sides know.
struct JobSecret {
  std::string job;  // Empty: any job will do.
  std::string secret;
  std::string host = {};  // The store's host, for messages: "rank 0".
};

// A connection whose two ends have proved to each other that they know the secret.
struct Greeted {
  UniqueFd fd;
  FrameParser received{kMaxFrame};  // May hold the first bytes already.
  HostPort server;
  std::string host;  // Who hosts the store: "rank 0".
  HostPort local;    // This end.
};

// `hello` comes without nonce and proof.
// Errors: DeadlineExceeded with the address and the last obstacle; else what the store says: PermissionDenied for a
// wrong secret, InvalidArgument for a wrong rank or world size, FailedPrecondition for another version or build.
absl::StatusOr<Greeted> Greet(const FindServer& find, const Hello& hello, const JobSecret& job, absl::Time deadline);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GREET_H_
