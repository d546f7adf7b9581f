// Connects the ranks of a group, each with each other, over one listening socket per rank that is
// open only meanwhile.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpMeeting> meeting,
//             TcpMeeting::Create(rank, {"world", world_size, key}, {.bind_address = "10.0.0.7"}));
//   ... meeting->address() of every rank to every rank ...
//   // by rank
//   EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting->Run(addresses, deadline));
//
// A connection counts when both ends have proved who they are
// (comm/net/peer_greeting.h). Whoever else comes is let go without holding up
// anybody.
//
// Threads: Create(), then Run() once; Cancel() from any thread, at any time.
// Errors:  InvalidArgument for an address that is not this host's; DeadlineExceeded names the ranks
//          that have not come; PermissionDenied if a rank that this one connects to has another
//          key; what Cancel() was given.

#ifndef EVENKEEL_COMM_TCP_MEETING_H_
#define EVENKEEL_COMM_TCP_MEETING_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/tcp/call.h"
#include "evenkeel/comm/tcp/reception.h"

namespace evenkeel::internal {

struct TcpMeetingOptions {
  std::string bind_address = "127.0.0.1";
  absl::Duration greeting_timeout = absl::Seconds(5);  // For a caller to prove who it is.
  WarnFunction warn = nullptr;  // Is told, once, who is missing after kSilentWait.
};

class TcpMeeting {
 public:
  static absl::StatusOr<std::unique_ptr<TcpMeeting>> Create(int rank, PeerGroup group,
                                                            const TcpMeetingOptions& options = {});

  // Where this rank listens, for the others' Run().
  const std::string& address() const { return address_; }
  // `addresses`: by rank. Until all are connected; nobody listens any more when it returns.
  absl::StatusOr<std::vector<UniqueFd>> Run(const std::vector<std::string>& addresses,
                                            absl::Time deadline);
  // Ends Run() with `why`.
  void Cancel(const absl::Status& why);

 private:
  TcpMeeting(int rank, PeerGroup group, const TcpMeetingOptions& options, UniqueFd listener,
             WakeUp wake, std::string address);

  absl::StatusOr<std::vector<UniqueFd>> Meet(const std::vector<std::string>& addresses,
                                             absl::Time deadline);
  bool IsComplete() const;
  // Until there is something to do.
  void Wait(absl::Time deadline) const;
  absl::Status WhoIsMissing(absl::Duration waited) const;
  absl::Status cancelled() const;

  const int rank_;
  const PeerGroup group_;
  const WarnFunction warn_;
  const WakeUp wake_;
  const std::string address_;
  std::unique_ptr<TcpReception> reception_;  // Null after Run().
  std::vector<TcpCall> calls_;

  mutable absl::Mutex mutex_;
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_MEETING_H_
