// Connects each rank of a group with each other rank: between hosts over TCP, within a host over
// Unix sockets. A rank connects to the lower ranks, and listens until all higher ranks have
// connected.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<PeerMeeting> meeting,
//                       PeerMeeting::OverTcp(rank, {"world", world_size, key}, "10.0.0.7"));
//   ... send meeting->address() of every rank to every rank ...
//   // by rank
//   EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting->Run(addresses, deadline));
//
// Both ends of a connection have proved their identities (comm/net/peer_greeting.h). All other
// callers are refused, counted, and delay no rank (comm/net/peer_reception.h).
//
// Threads: create it, then call Run() once; Cancel() from any thread, at any time.
// Errors:  DeadlineExceeded names the ranks that have not connected, the obstacles, and the number
//          of refused callers; PermissionDenied if a rank to which this one connects has another
//          key, within a host also if a caller has one; ResourceExhausted within a host if no file
//          descriptor was free for kDescriptorPatience; InvalidArgument for an address that cannot
//          be parsed; the error that was passed to Cancel().

#ifndef EVENKEEL_COMM_NET_PEER_MEETING_H_
#define EVENKEEL_COMM_NET_PEER_MEETING_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_call.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_reception.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

struct PeerMeetingOptions {
  // The time for a caller to prove its identity.
  absl::Duration greeting_timeout = absl::Seconds(5);
  // A lack of file descriptors that lasts longer is an error.
  absl::Duration descriptor_patience = absl::InfiniteDuration();
  // After this time the missing ranks are logged, once.
  absl::Duration warn_after = kSilentWait;
  WarnFunction warn = nullptr;
};

class PeerMeeting {
 public:
  // Errors: InvalidArgument for an address that is not this host's.
  static absl::StatusOr<std::unique_ptr<PeerMeeting>> OverTcp(
      int rank, PeerGroup group, const std::string& bind_address,
      const PeerMeetingOptions& options = {});
  // For processes of one host and one user.
  // Errors: ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<PeerMeeting>> OnThisHost(int rank, PeerGroup group);

  // The address of this rank's listener, for Run() of the other ranks.
  const std::string& address() const { return address_.text; }
  // Connects to all ranks; `addresses` are by rank.
  absl::StatusOr<std::vector<UniqueFd>> Run(const std::vector<std::string>& addresses,
                                            absl::Time deadline);
  // Ends Run() with `why`. Only the first call counts.
  void Cancel(const absl::Status& why);

 private:
  PeerMeeting(int rank, PeerGroup group, PeerListener listener, WakeUp wake,
              const PeerMeetingOptions& options);

  absl::StatusOr<std::vector<UniqueFd>> Meet(const std::vector<std::string>& addresses,
                                             absl::Time deadline);
  absl::Status StartCalls(const std::vector<std::string>& addresses);
  absl::Status CheckDescriptors(absl::Time now);
  bool IsComplete() const;
  // Waits for an event of a connection, and at most until the deadline.
  void Wait(absl::Time deadline) const;
  absl::Status MissingRanks(absl::Duration waited) const;
  absl::Status cancelled() const;

  const int rank_;
  const PeerGroup group_;
  const PeerMeetingOptions options_;
  const WakeUp wake_;
  const PeerAddress address_;
  std::unique_ptr<PeerReception> reception_;  // Null after Run().
  std::vector<PeerCall> calls_;
  absl::Time lacks_since_ = absl::InfiniteFuture();  // Finite while no file descriptor is free.

  mutable absl::Mutex mutex_;
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_MEETING_H_
