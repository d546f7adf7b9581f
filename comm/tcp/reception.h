// The answering half of a meeting: listens until the higher ranks of the group are in, and lets in
// nobody else.
//
//   TcpReception reception(rank, group, std::move(listener), greeting_timeout);
//   while (!reception.IsComplete()) {
//     ... poll() for what reception.AddTo(entries, wake_at) asks for ...
//     reception.Turn(SteadyNow());
//   }
//
// A caller is sent a challenge and has a few seconds and two kilobytes for its hello; of too many
// that have not said one, the oldest goes. Who does not prove its rank is told so and let go; so is
// a second one of a rank that is here.
//
// Threads: thread-compatible. Never blocks.

#ifndef EVENKEEL_COMM_TCP_RECEPTION_H_
#define EVENKEEL_COMM_TCP_RECEPTION_H_

#include <poll.h>

#include <list>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/tcp/line.h"

namespace evenkeel::internal {

class TcpReception {
 public:
  TcpReception(int rank, const PeerGroup& group, UniqueFd listener,
               absl::Duration greeting_timeout);

  // Returns the events to poll for, and the latest time of the next call.
  void AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const;
  void Turn(absl::Time now);

  bool IsComplete() const { return missing_ == 0; }
  std::vector<int> Missing() const;
  // Returns the number of callers that could not authenticate.
  int refused() const { return refused_; }
  // The connections, by rank.
  std::vector<UniqueFd>& admitted() { return admitted_; }

 private:
  struct Caller {
    TcpLine line;
    PeerChallenge challenge;
    absl::Time deadline;
    int rank = -1;            // Once it has proved it; it is admitted when it has been told.
    bool is_refused = false;  // It is admitted never, and goes when it has been told.
  };

  void Accept(absl::Time now);
  void CloseIfComplete();
  // Not OK: the caller goes.
  absl::Status Advance(Caller& caller);
  absl::Status Judge(const Caller& caller, const PeerHello& hello) const;
  bool IsHere(int rank) const;

  const int rank_;
  const PeerGroup group_;
  UniqueFd listener_;
  const absl::Duration greeting_timeout_;
  absl::Time accept_again_ = absl::InfinitePast();
  std::list<Caller> callers_;  // By age.
  std::vector<UniqueFd> admitted_;
  int missing_;
  int refused_ = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_RECEPTION_H_
