// The control plane of a group: messages of a few dozen bytes beside the data, always on the host,
// never on a device's stream.
//
//   // every rank's bytes to every rank, asynchronous
//   control.Exchange("shapes", my_hash, callback)
//   // a value that one rank publishes, others wait for
//   control.Put("order", bytes);  control.Get("order", timeout)
//   control.Send(3, "plan", bytes);  control.Receive("plan", timeout)
//
// Each rank has a link to one hub, which is in this process (ranks are threads) or behind a TCP
// connection. The hub tracks which ranks are connected, and receives their positions with their
// heartbeats; so a wait that can never end fails soon and on every rank. Exchanges of more than 32
// ranks travel over a tree of the ranks, with two messages per edge.
//
// Order:   exchanges of one topic are numbered per rank from 0, and the n-th exchange of one rank
//          pairs with the n-th of the others. Messages to one rank on one topic arrive in the order
//          in which they were sent.
// Threads: thread-safe. Callbacks run on the control thread of this rank, one at a time, and must
//          not block; those that Close() ends run on its caller's thread.
// Errors:  Unavailable names the rank that failed or left; DeadlineExceeded names the ranks that
//          have not arrived, with their positions. After a failure every wait ends with it.

#ifndef EVENKEEL_COMM_CONTROL_CONTROL_H_
#define EVENKEEL_COMM_CONTROL_CONTROL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"

namespace evenkeel {

class ControlChannel {
 public:
  using Parts = std::vector<std::string>;  // One per rank.
  using ExchangeCallback = std::function<void(absl::StatusOr<Parts>)>;

  ControlChannel(int rank, int world_size, std::unique_ptr<ControlLink> link);
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Sends every rank's payload to every rank. Returns at once; `done` receives the parts, or the
  // failure.
  void Exchange(absl::string_view topic, std::string payload, ExchangeCallback done);
  // The same, and waits.
  absl::StatusOr<Parts> Exchange(absl::string_view topic, std::string payload,
                                 absl::Duration timeout);

  // Publishes a value under a key that was not used before in this group. Get() waits for the
  // value.
  void Put(absl::string_view key, std::string value);
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout);

  // Sends one message to one rank, which may be this one. Receive() takes the oldest message of the
  // topic, from any sender. `from` is the only possible sender, and a description of the wait; both
  // are used to decide whether the wait can end.
  struct From {
    int rank = -1;     // -1: any rank.
    std::string text;  // After "waits in".
    // Nothing but the message helps, although the timeout is shorter than that of the group.
    bool is_endless = false;
    // The wait to report instead, if the message stands for an event of several ranks.
    std::optional<internal::Wait> as = std::nullopt;
  };
  void Send(int to, absl::string_view topic, std::string payload) {
    Send(absl::Span<const int>(&to, 1), topic, std::move(payload));
  }
  // Sends the same to several ranks, in one message to the hub.
  void Send(absl::Span<const int> to, absl::string_view topic, std::string payload);
  absl::StatusOr<std::string> Receive(absl::string_view topic, absl::Duration timeout,
                                      const From& from);
  absl::StatusOr<std::string> Receive(absl::string_view topic, absl::Duration timeout) {
    return Receive(topic, timeout, From());
  }
  // Drops one message of the topic, now or when it arrives.
  void Discard(absl::string_view topic);

  // Sends a message to all other ranks; their notice handlers run on their control threads.
  void Notify(absl::string_view topic, std::string payload) {
    Notify(-1, topic, std::move(payload));
  }
  void Notify(int to, absl::string_view topic, std::string payload);  // Only to this rank.
  // Like Notify(), unless a rank of the group has sent an equal message by NotifyOnce(): for
  // messages that many ranks send, and of which one is enough.
  void NotifyOnce(absl::string_view topic, std::string payload);

  // Ends the group: the failure handlers of all ranks, this one included, receive `why` with this
  // rank as the culprit. Only the first failure of a group counts. `unheard`: how long this rank
  // has received nothing from the hub, if that is the reason.
  void Fail(const absl::Status& why, absl::Duration unheard = absl::ZeroDuration());
  // The ranks whose parts are missing from what a thread waits for, and their positions by their
  // last heartbeats. Both are empty if the hub does not reply soon.
  struct Missing {
    std::vector<int> ranks;
    std::string text;  // "ranks 1,3 (rank 1 runs, 12 s after ...; rank 3 waits in ...)".
  };
  Missing WhoIsMissing(const internal::Wait& wait);
  Missing WhoIsMissing(absl::string_view topic, int64_t sequence);  // The same for an exchange.
  // The loss of the hub, with the rank that hosted it if it is known.
  FailureInfo HubLost() const;
  // From now on this rank's silence is not a failure.
  void Leave();

  // Sends a heartbeat with this rank's position (RankStatus::Serialize(), or nothing). More than
  // `silence` without another heartbeat means that the rank is lost; 0 disables this check.
  void Beat(std::string rank_status, absl::Duration silence);
  // Returns the number of messages of the hub that have been handled, without heartbeats.
  int64_t received() const;

  // After a failure, waits until every rank of the group has called it, has left, or is lost; then
  // for at most the longest `wait` of the ranks, or twice if another rank is lost meanwhile, until
  // each lost rank has a newcomer, except where all ranks are in this process. `members`: the
  // ranks' numbers in the job. A newcomer, over a link that it has opened as one
  // (GroupSeat::incarnation), waits for the place of a lost rank; it passes neither argument.
  // Returns the next group's ranks, in the numbers of this group; for a newcomer, in those of the
  // ended group, which the result names.
  // Errors: DeadlineExceeded names the ranks that have not called it, not left, and are not lost.
  //         Unavailable: the hub is gone. Aborted: the hub has declared this rank lost.
  //         FailedPrecondition: it never gets a newcomer's place.
  absl::StatusOr<to_rank::Regrouped> Regroup(absl::Duration timeout,
                                             absl::Duration wait = absl::ZeroDuration(),
                                             std::vector<int> members = {});
  // Returns the loss of the hub, or of a survivor since the last Regroup(), else OK.
  absl::Status SurvivorsStatus() const;

  ControlLink& link() { return *link_; }
  // Returns the register of this rank's threads that use the group; blocking calls of this class
  // record themselves in it.
  const std::shared_ptr<internal::Waits>& waits() const { return waits_; }

  // A wait with a shorter timeout than this ends by itself, and is not part of a deadlock. Set
  // before other threads use the channel.
  void SetEndless(absl::Duration timeout) { endless_ = timeout; }

  // Set once. The failure handler is called at most once, while all waits are still open (it calls
  // Close()); `culprit` is -1 if the hub itself is gone. Earlier failures and notices are passed to
  // the handlers at once.
  void SetHandlers(
      std::function<void(int culprit, const absl::Status& why)> on_failure,
      std::function<void(int from, absl::string_view topic, absl::string_view payload)> on_notice);
  // Ends every wait, now and later, with `why`. Local: no other rank is notified.
  void Close(const absl::Status& why);
  // Ends the connection. No handler or callback runs after it returns. Handlers and callbacks must
  // not call it.
  void Stop();

 private:
  // Returns the register of waits for a wait that cannot end by itself, else null.
  std::shared_ptr<internal::Waits> IfEndless(absl::Duration timeout) const;
  void OnMessage(ToRank message);
  void Handle(to_rank::Exchanged exchanged);
  void Handle(to_rank::Message message);
  void Handle(to_rank::Notice notice);
  void Handle(to_rank::Failed failed);
  void Handle(to_rank::SurvivorLost lost);
  // The replies to Request(): Value, Missing, Regrouped.
  void Handle(auto reply) requires requires { reply.request; };
  // Handled by the link.
  void Handle(to_rank::Beat) {}
  void Handle(to_rank::Poll) {}
  void OnLost(const absl::Status& why);

  // The event that ends a request early.
  enum class Until { kClosed, kLost };
  // `waits`: the register of its wait, and the text for it.
  template <typename Message>
  absl::StatusOr<typename Message::Reply> Request(
      Message message, absl::Duration timeout, Until until,
      const std::shared_ptr<internal::Waits>& waits = nullptr, const std::string& text = "");

  const int rank_;
  const int world_size_;
  const std::unique_ptr<ControlLink> link_;
  absl::Duration endless_ = absl::Seconds(5);
  const std::shared_ptr<internal::Waits> waits_ = internal::Waits::Create();

  mutable absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);     // The hub is gone.
  absl::Status cut_off_ ABSL_GUARDED_BY(mutex_);  // The reason for which the hub will end the link.
  absl::Status survivors_status_ ABSL_GUARDED_BY(mutex_);
  int64_t received_ ABSL_GUARDED_BY(mutex_) = 0;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, int64_t, std::less<>> sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<ExchangeId, ExchangeCallback> exchanges_ ABSL_GUARDED_BY(mutex_);
  int64_t next_request_ ABSL_GUARDED_BY(mutex_) = 0;
  // By number: the reply, if it has come.
  std::map<int64_t,
           std::variant<std::monostate, to_rank::Value, to_rank::Missing, to_rank::Regrouped>>
      requests_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::deque<std::string>, std::less<>> inbox_ ABSL_GUARDED_BY(mutex_);
  std::multiset<std::string> unwanted_
      ABSL_GUARDED_BY(mutex_);  // Topics of messages that are dropped when they arrive.
  std::function<void(int, const absl::Status&)> on_failure_ ABSL_GUARDED_BY(mutex_);
  std::function<void(int, absl::string_view, absl::string_view)> on_notice_ ABSL_GUARDED_BY(mutex_);
  std::vector<ToRank> early_
      ABSL_GUARDED_BY(mutex_);  // A failure and notices from before the handlers were set.
};

// Returns "rank 2", "ranks 0,3,4": the form of ranks in messages.
std::string RankList(const std::vector<int>& ranks);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONTROL_CONTROL_H_
