// Connects the ranks of a group that are on one host, each with each other, by Unix sockets. Rank r
// calls the ranks below it and is called by those above it; it listens only meanwhile.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<ShmMeeting> meeting,
//                       ShmMeeting::Create(rank, {"world", world_size, key}));
//   ... meeting->address() of every rank to every rank ...
//   // by rank
//   EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting->Run(addresses, deadline));
//
// An address is the name that the kernel chose and a nonce of the listener. The caller speaks at
// once, because what challenges it is that nonce:
//
//   higher -> lower    ShmHello      the listener's nonce, and a PeerHello
//   lower -> higher    PeerVerdict   a proof likewise, or a refusal with a sentence
//
// Both proofs are as over TCP (comm/net/peer_greeting.h), for a group of another
// name. Who does not know the nonce was not told the address: a stranger, let go without a word,
// and so is another user's process. Who knows it and proves nothing has another key, and that ends
// the meeting on both sides.
//
// Threads: Create(), then Run() once; Cancel() from any thread, at any time.
// Errors:  DeadlineExceeded names the ranks that have not come; PermissionDenied names the rank
//          that has another key; InvalidArgument for what is no address; what Cancel() was given.

#ifndef EVENKEEL_COMM_SHM_MEETING_H_
#define EVENKEEL_COMM_SHM_MEETING_H_

#include <poll.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

// Where a rank listens.
struct ShmAddress {
  std::string name;  // In the abstract name space, without the zero in front.
  std::string nonce;

  std::string ToString() const;
  static absl::StatusOr<ShmAddress> Parse(absl::string_view text);
};

struct ShmHello {
  std::string listener_nonce;
  PeerHello hello;

  std::string Serialize() const;
  static absl::StatusOr<ShmHello> Parse(absl::string_view bytes);
};

class ShmMeeting {
 public:
  static absl::StatusOr<std::unique_ptr<ShmMeeting>> Create(int rank, PeerGroup group);

  const std::string& address() const { return address_text_; }
  // `addresses`: by rank. Until all are connected; nobody listens any more when it returns.
  absl::StatusOr<std::vector<UniqueFd>> Run(const std::vector<std::string>& addresses,
                                            absl::Time deadline);
  // Ends Run() with `why`.
  void Cancel(const absl::Status& why);

 private:
  // A lower rank; without a descriptor it is called at `again`.
  struct Call {
    int to = 0;
    ShmAddress address;
    UniqueFd fd;
    bool is_done = false;
    PeerHello hello;
    absl::Time again = absl::InfinitePast();
    absl::Duration pause;
    absl::Status obstacle;  // Why the last attempt came to nothing.
  };

  ShmMeeting(int rank, PeerGroup group, UniqueFd listener, WakeUp wake, ShmAddress address);

  absl::Status Meet(const std::vector<std::string>& addresses, absl::Time deadline);
  // Not OK: the meeting is over.
  absl::Status TurnCall(Call& call, absl::Time now);
  // Not OK: this attempt has failed.
  absl::StatusOr<std::optional<PeerVerdict>> Advance(Call& call) const;
  absl::Status Start(Call& call) const;
  absl::Status Judge(const Call& call, const PeerVerdict& verdict) const;
  // To be called when no descriptor is left. Returns OK for some seconds, then `why`.
  absl::Status Lack(absl::Time now, const absl::Status& why);
  absl::Status Accept(absl::Time now);
  absl::Status TurnCallers();
  // Answers a caller's hello; not OK: the meeting is over.
  absl::Status Answer(UniqueFd& caller, absl::string_view bytes);
  bool IsComplete() const;
  // Until there is something to do.
  void Wait(absl::Time deadline) const;
  absl::Status WhoIsMissing(absl::Duration waited) const;
  absl::Status cancelled() const;

  const int rank_;
  const PeerGroup group_;
  const WakeUp wake_;
  const ShmAddress address_;
  const std::string address_text_;
  UniqueFd listener_;
  absl::Time accept_again_ = absl::InfinitePast();
  absl::Time lacks_since_ = absl::InfiniteFuture();  // Finite: no descriptor is left.
  std::vector<Call> calls_;
  std::list<UniqueFd> callers_;  // By age; they have said nothing yet.
  std::vector<UniqueFd> admitted_;
  int refused_ = 0;

  mutable absl::Mutex mutex_;
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_MEETING_H_
