// The calling half of a meeting: a connection to one lower rank of the group, tried until it is
// made.
//
//   TcpCall call(rank, group, /*to=*/0, address);
//   while (!call.IsDone()) {
//     ... poll() for what call.AddTo(entries, wake_at) asks for ...
//     EK_RETURN_IF_ERROR(call.Turn(SteadyNow()));
//   }
//
// A caller that is disconnected before a reply calls again, with growing delays.
//
// Threads: thread-compatible. Never blocks.
// Errors:  PermissionDenied and what else the other one refuses with: to call again would not help.

#ifndef EVENKEEL_COMM_TCP_CALL_H_
#define EVENKEEL_COMM_TCP_CALL_H_

#include <poll.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/tcp/line.h"

namespace evenkeel::internal {

class TcpCall {
 public:
  TcpCall(int rank, const PeerGroup& group, int to, HostPort address);

  // Returns the events to poll for, and the latest time of the next call.
  void AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const;
  absl::Status Turn(absl::Time now);

  bool IsDone() const { return state_ == State::kDone; }
  int to() const { return to_; }
  // Why the last attempt came to nothing.
  const absl::Status& obstacle() const { return obstacle_; }
  // Once done.
  UniqueFd& connection() { return line_.fd; }

 private:
  // Forwards, and from each but the last one back to the first.
  enum class State { kPausing, kConnecting, kAwaitsChallenge, kAwaitsVerdict, kDone };

  // Not OK: this attempt has failed. `refusal_`: so will others.
  absl::Status Advance();
  absl::Status HandleChallenge(const std::string& frame);
  absl::Status HandleVerdict(const std::string& frame);

  const int rank_;
  const PeerGroup group_;
  const int to_;
  const HostPort address_;
  State state_ = State::kPausing;
  absl::Time again_ = absl::InfinitePast();
  absl::Duration pause_;
  TcpLine line_;
  PeerChallenge challenge_;
  PeerHello hello_;
  absl::Status obstacle_;
  absl::Status refusal_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_CALL_H_
