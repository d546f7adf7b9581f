// The control plane of a group: a few dozen bytes beside the data, always on the host, never on a device's stream.
//
//   control.Exchange("shapes", my_hash, callback)        // every rank's bytes to every rank, asynchronous
//   control.Put("order", bytes);  control.Get("order", timeout)   // a value that one rank publishes, others wait for
//   control.Send(3, "plan", bytes);  control.Receive("plan", timeout)
//
// Each rank has a link to one hub, which lives in this process (ranks are threads) or behind a TCP connection. The hub
// knows who is still there, and from the ranks' heartbeats where they are; so a wait that can never end fails soon and
// on every rank. Exchanges of more than 32 ranks go over a tree of the ranks, two messages per edge.
//
// Order:   exchanges of one topic are numbered per rank from 0, and the n-th of one rank meets the n-th of the others.
//          Messages to one rank on one topic arrive in the order of their sending.
// Threads: thread-safe. Callbacks run on the control thread of this rank, one at a time, and must not block; those that
//          Close() ends run on its caller's thread.
// Errors:  Unavailable names the rank that failed or left; DeadlineExceeded names the ranks that have not arrived, and
//          where they are. After a failure every wait ends with it.

#ifndef EVENKEEL_COMM_CONTROL_H_
#define EVENKEEL_COMM_CONTROL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control_link.h"
#include "evenkeel/comm/internal/waits.h"

namespace evenkeel {

class ControlChannel {
 public:
  using Parts = std::vector<std::string>;  // One per rank.
  using ExchangeCallback = std::function<void(const absl::StatusOr<Parts>&)>;

  ControlChannel(int rank, int world_size, std::unique_ptr<ControlLink> link);
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Every rank's payload to every rank. Returns at once; `done` gets the parts, or the failure.
  void Exchange(absl::string_view topic, std::string payload, ExchangeCallback done);
  // The same, and waits.
  absl::StatusOr<Parts> Exchange(absl::string_view topic, std::string payload, absl::Duration timeout);

  // Publishes a value under a key that was not used before in this group; Get() waits until it is there.
  void Put(absl::string_view key, std::string value);
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout);

  // One message to one rank (to itself too); Receive() takes the oldest one of the topic, whoever sent it. `from` says
  // whose message it can only be, and what the wait for it is called, for those who want to know whether it can end.
  struct From {
    int rank = -1;     // -1: anybody's.
    std::string text;  // After "waits in".
  };
  void Send(int to, absl::string_view topic, std::string payload);
  absl::StatusOr<std::string> Receive(absl::string_view topic, absl::Duration timeout, const From& from);
  absl::StatusOr<std::string> Receive(absl::string_view topic, absl::Duration timeout) {
    return Receive(topic, timeout, From());
  }
  // One message of the topic will not be received: it is dropped, now or when it comes.
  void Discard(absl::string_view topic);

  // A message to all other ranks, given to their notice handler on their control thread.
  void Notify(absl::string_view topic, std::string payload);

  // Ends the group: the failure handler of every rank, this one included, gets `why` with this rank as the culprit.
  // Only the first failure of a group counts.
  void Fail(const absl::Status& why);
  // "ranks 1,3 (rank 1 runs, 12 s after ...; rank 3 waits in ...)": whose part is missing from what a thread waits for,
  // and where they were by their last heartbeats. Empty if that can't be found out soon.
  std::string WhoIsMissing(const internal::Wait& wait);
  std::string WhoIsMissing(absl::string_view topic, int64_t sequence);  // Of an exchange.
  // From now on this rank's silence is no failure.
  void Leave();

  // This rank lives, and is there (Whereabouts::Serialize(), or nothing); more than `silence` without another such
  // message means that it is lost. Zero: no longer.
  void Beat(std::string whereabouts, absl::Duration silence);
  // How many messages of the hub have been dealt with, heartbeats left out.
  int64_t received() const;

  // After a failure: waits until every rank of the group has come here, has left, or is lost.
  // Errors: DeadlineExceeded names the ranks that have neither come, nor left, nor been lost. Unavailable: the hub is
  //         gone. Aborted: the hub has declared this rank lost.
  struct Survivors {
    std::vector<int> ranks;  // In order; this one may be missing if the others took it for lost.
    int64_t round = 0;       // Equal on all of them; another one each time.
  };
  absl::StatusOr<Survivors> Regroup(absl::Duration timeout);

  ControlLink& link() { return *link_; }
  // Which threads of this rank use the group; blocking calls here keep account in it.
  const std::shared_ptr<internal::Waits>& waits() const { return waits_; }

  // A wait that ends sooner by itself is a way to go on, and no part of a deadlock. Set before others use the channel.
  void SetEndless(absl::Duration timeout) { endless_ = timeout; }

  // Set once. The failure handler is called at most once, with every wait still open (it calls Close()); `culprit` is
  // -1 if the hub itself is gone. What came before they were set is given to them at once.
  void SetHandlers(std::function<void(int culprit, const absl::Status& why)> on_failure,
                   std::function<void(int from, absl::string_view topic, absl::string_view payload)> on_notice);
  // Ends every wait, now and later, with `why`. Local; tells nobody.
  void Close(const absl::Status& why);
  // Ends the connection: no handler or callback runs after it returns. Not to be called by one.
  void Stop();

 private:
  // The account, for a wait that counts as one for good.
  std::shared_ptr<internal::Waits> IfEndless(absl::Duration timeout) const;
  void OnMessage(ControlMessage message);
  void Handle(ControlMessage message);
  void OnLost(const absl::Status& why);

  // What a request waits for; what ends it early.
  enum class Until { kClosed, kLost };
  absl::StatusOr<ControlMessage> Request(ControlMessage message, absl::Duration timeout, Until until,
                                         const std::shared_ptr<internal::Waits>& waits = nullptr);

  const int rank_;
  const int world_size_;
  const std::unique_ptr<ControlLink> link_;
  absl::Duration endless_ = absl::Seconds(5);
  const std::shared_ptr<internal::Waits> waits_ = internal::Waits::Create();

  mutable absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);     // The hub is gone.
  absl::Status cut_off_ ABSL_GUARDED_BY(mutex_);  // Why the hub will end the link.
  int64_t received_ ABSL_GUARDED_BY(mutex_) = 0;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, int64_t, std::less<>> sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, int64_t>, ExchangeCallback> exchanges_ ABSL_GUARDED_BY(mutex_);
  int64_t next_request_ ABSL_GUARDED_BY(mutex_) = 0;
  // Requests that wait for their answer; null until it is there.
  std::map<int64_t, std::unique_ptr<ControlMessage>> requests_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::deque<std::string>, std::less<>> inbox_ ABSL_GUARDED_BY(mutex_);
  std::multiset<std::string> unwanted_ ABSL_GUARDED_BY(mutex_);  // Topics of messages to be dropped when they come.
  std::function<void(int, const absl::Status&)> on_failure_ ABSL_GUARDED_BY(mutex_);
  std::function<void(int, absl::string_view, absl::string_view)> on_notice_ ABSL_GUARDED_BY(mutex_);
  std::vector<ControlMessage> early_ ABSL_GUARDED_BY(mutex_);  // Failure and notices from before the handlers were set.
};

// "rank 2", "ranks 0,3,4": how messages name ranks.
std::string RankList(const std::vector<int>& ranks);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONTROL_H_
