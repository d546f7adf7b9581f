// The calling half of a meeting: connects to one lower rank of the group, and retries until it is
// connected.
//
//   PeerCall call(rank, group, /*to=*/0, address);
//   while (!call.IsDone()) {
//     ... poll() for the events that call.AddTo(entries, wake_at) adds ...
//     EK_RETURN_IF_ERROR(call.Turn(SteadyNow()));
//   }
//
// A caller that is disconnected before it has a verdict calls again, after growing pauses.
//
// Threads: thread-compatible. Never blocks.
// Errors:  PermissionDenied if the listener does not prove its rank, and the listener's refusals: a
//          retry would not help.

#ifndef EVENKEEL_COMM_NET_PEER_CALL_H_
#define EVENKEEL_COMM_NET_PEER_CALL_H_

#include <poll.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_line.h"

namespace evenkeel::internal {

class PeerCall {
 public:
  PeerCall(int rank, const PeerGroup& group, int to, PeerAddress address);

  // Adds the events to poll for, and lowers `wake_at` to the time of the next attempt.
  void AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const;
  // Advances the handshake as far as it goes without waiting.
  absl::Status Turn(absl::Time now);

  bool IsDone() const { return state_ == State::kDone; }
  int to() const { return to_; }
  // The error of the last failed attempt.
  const absl::Status& obstacle() const { return obstacle_; }
  // Returns an error if the last attempt found no free file descriptor, or no memory for a socket.
  absl::Status Lack() const;
  // Valid once IsDone().
  UniqueFd& connection() { return line_.fd; }

 private:
  // Each state leads to the next one (over a Unix socket, kConnecting to kAwaitsVerdict), and all
  // but the last one back to the first.
  enum class State { kPausing, kConnecting, kAwaitsChallenge, kAwaitsVerdict, kDone };

  // Returns an error if this attempt has failed. If `refusal_` is set, later ones would fail, too.
  absl::Status Advance();
  absl::Status SayHello(PeerChallenge challenge);
  absl::Status HandleVerdict(const std::string& message);

  const int rank_;
  const PeerGroup group_;
  const int to_;
  const PeerAddress address_;
  State state_ = State::kPausing;
  absl::Time again_ = absl::InfinitePast();
  absl::Duration pause_;
  PeerLine line_;
  PeerChallenge challenge_;
  PeerHello hello_;
  absl::Status obstacle_;
  absl::Status refusal_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_CALL_H_
