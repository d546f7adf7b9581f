// The listening half of a meeting: listens until all higher ranks of the group are connected, and
// admits no other process.
//
//   PeerReception reception(rank, group, std::move(listener), greeting_timeout);
//   while (!reception.IsComplete()) {
//     ... poll() for the events that reception.AddTo(entries, wake_at) adds ...
//     EK_RETURN_IF_ERROR(reception.Turn(SteadyNow()));
//   }
//
// A caller has the timeout and two kilobytes for its hello; when there are too many callers, the
// oldest is disconnected. A caller that does not prove its rank receives a refusal and is
// disconnected; so does a second caller of a rank that is connected.
//
// Over a Unix socket, a caller without the address's nonce is disconnected without a reply; so is a
// process of another user.
//
// Threads: thread-compatible. Never blocks.
// Errors:  PermissionDenied if a caller over a Unix socket has the nonce and a wrong proof: it is a
//          rank with another key.

#ifndef EVENKEEL_COMM_NET_PEER_RECEPTION_H_
#define EVENKEEL_COMM_NET_PEER_RECEPTION_H_

#include <poll.h>

#include <list>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_line.h"

namespace evenkeel::internal {

class PeerReception {
 public:
  PeerReception(int rank, const PeerGroup& group, PeerListener listener,
                absl::Duration greeting_timeout);

  // Adds the events to poll for, and lowers `wake_at` to the next deadline.
  void AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const;
  // Accepts and serves callers as far as that goes without waiting.
  absl::Status Turn(absl::Time now);

  bool IsComplete() const { return missing_ == 0; }
  std::vector<int> Missing() const;
  // Returns the number of callers that were not admitted.
  int refused() const { return refused_; }
  // An error if no file descriptor was free for the last caller.
  const absl::Status& lack() const { return lack_; }
  // The connections, by rank.
  std::vector<UniqueFd>& admitted() { return admitted_; }

 private:
  struct Caller {
    PeerLine line;
    PeerChallenge challenge;
    absl::Time deadline;
    int rank = -1;            // Set once proved. The caller is admitted once the verdict is sent.
    bool is_refused = false;  // The caller is disconnected once the verdict is sent.
  };

  void Accept(absl::Time now);
  void CloseIfComplete();
  // Returns an error if the caller must be disconnected.
  absl::Status Advance(Caller& caller);
  absl::StatusOr<PeerHello> ParseHello(absl::string_view message) const;
  absl::Status Judge(const Caller& caller, const PeerHello& hello) const;
  bool IsConnected(int rank) const;

  const int rank_;
  const PeerGroup group_;
  PeerListener listener_;
  const absl::Duration greeting_timeout_;
  absl::Time accept_again_ = absl::InfinitePast();
  absl::Status lack_;
  absl::Status over_;          // The error that ends the meeting.
  std::list<Caller> callers_;  // By age.
  std::vector<UniqueFd> admitted_;
  int missing_;
  int refused_ = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_RECEPTION_H_
