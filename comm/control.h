// The control plane of a group: a few dozen bytes beside the data, always on the host, never on a device's stream.
//
//   control.Exchange("shapes", my_hash, callback)        // every rank's bytes to every rank, asynchronous
//   control.Put("order", bytes);  control.Get("order")   // a value that one rank publishes and others wait for
//   control.Send(3, "plan", bytes);  control.Receive("plan")
//
// First form: a star. Each rank has a link to one hub, which lives in this process (ranks are threads) or behind a TCP
// connection. The hub knows who is still there, so a wait that can never end fails at once and on every rank.
//
// Order:   exchanges of one topic are numbered per rank from 0, and the n-th of one rank meets the n-th of the others.
//          Messages to one rank on one topic arrive in the order of their sending.
// Threads: thread-safe. Callbacks run on the control thread of this rank, one at a time, and must not block; those that
//          Close() ends run on its caller's thread.
// Errors:  Unavailable names the rank that failed or left; DeadlineExceeded names the ranks that have not arrived.
//          After a failure every wait ends with it.

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
#include "evenkeel/comm/internal/waits.h"

namespace evenkeel {

// What travels between a rank and the hub. The comments say which fields count.
struct ControlMessage {
  enum class Type : uint8_t {
    kExchange,   // to hub: topic, sequence, payload.
    kExchanged,  // to rank: topic, sequence, parts (one per rank).
    kPut,        // to hub: topic = key, payload.
    kGet,        // to hub: topic = key, request.
    kMissing,    // to hub: topic and sequence of an exchange, request: which ranks have not arrived?
    kValue,      // to rank: request, payload.
    kSend,       // to hub: rank = receiver, topic, payload.  To rank: rank = sender.
    kNotice,     // as kSend, to all other ranks.
    kFailed,     // to hub: this rank ends the group, code, payload = message.  To every rank, the sender too:
                 // rank = who failed.
    kLeave,      // to hub: this rank leaves cleanly; its disconnection is no failure.
    kBeat,       // to hub: this rank lives; payload = its Whereabouts, or empty; request = how long, in microseconds,
                 // its silence is to be borne.  To rank, in answer: the hub lives.
    kRegroup,    // to hub, also after a failure: this rank wants a new group of those that are left; request.
    kRegrouped,  // to rank: request, payload = the survivors as "0,2,3", sequence = how many times ranks have regrouped.
  };
  Type type = Type::kNotice;
  int rank = -1;
  int64_t sequence = 0;
  int64_t request = 0;  // Chosen by the rank that asks, given back in the answer.
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string topic;
  std::string payload;
  std::vector<std::string> parts;
};

// A rank's connection to the hub. Implementations: in memory (comm/local.h) and TCP (comm/tcp_store.h).
class ControlLink {
 public:
  virtual ~ControlLink() = default;
  // Called once, before anything else. `receive` gets each message on the link's own thread, one at a time; `lost` is
  // called at most once, on that thread, when the hub is gone.
  virtual void Start(std::function<void(ControlMessage)> receive, std::function<void(absl::Status)> lost) = 0;
  // Never waits for a peer. A link that is lost swallows it.
  virtual void Send(ControlMessage message) = 0;
  // This process's link to another group of the same job. The group begins with the first link to it.
  virtual absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank, int world_size) = 0;
  // 32 bytes that only processes of this job can compute: another value for each purpose, the same on all ranks.
  virtual std::string Key(absl::string_view purpose) const = 0;
  // How long nothing was heard of the hub; zero where it can't fall silent by itself.
  virtual absl::Duration Silence() const { return absl::ZeroDuration(); }
  // Stops the link's thread; no callback runs after it returns. What was sent before is still delivered. Not to be
  // called on the link's own thread.
  virtual void Stop() = 0;
};

// The middle of the star for one group. Pure bookkeeping: transports bring it messages and take away what it wants
// sent.
// Threads: thread-safe.
class ControlHub {
 public:
  // `deliver(rank, message)` is called without any lock held.
  ControlHub(int world_size, std::function<void(int rank, ControlMessage message)> deliver);

  int world_size() const { return world_size_; }
  void OnMessage(int rank, ControlMessage message);
  // The connection of `rank` has ended. Without a kLeave before it, that is a failure of the rank.
  void OnDisconnect(int rank);

 private:
  struct Pending {  // An exchange that is not complete.
    std::vector<std::string> parts;
    std::vector<bool> arrived;
    int missing = 0;
  };
  using Outbox = std::vector<std::pair<int, ControlMessage>>;

  void Handle(int rank, ControlMessage message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleExchange(int rank, ControlMessage message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleLeave(int rank, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers those that want a new group, once nobody else can come.
  void RegroupIfComplete(Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int> MissingFrom(const std::string& topic, int64_t sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailAll(int culprit, absl::StatusCode code, std::string message, Outbox& outbox)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_size_;
  const std::function<void(int, ControlMessage)> deliver_;
  absl::Mutex mutex_;
  ControlMessage failure_ ABSL_GUARDED_BY(mutex_);  // Code not OK: the group has ended, and this told why.
  std::set<int> left_ ABSL_GUARDED_BY(mutex_);
  std::set<int> lost_ ABSL_GUARDED_BY(mutex_);
  std::map<int, int64_t> regrouping_ ABSL_GUARDED_BY(mutex_);  // Rank, its request.
  int64_t regrouped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::pair<std::string, int64_t>, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::pair<int, int64_t>>> waiting_ ABSL_GUARDED_BY(mutex_);  // key: rank, request.
};

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

  // One message to one rank (to itself too); Receive() takes the oldest one of the topic, whoever sent it.
  void Send(int to, absl::string_view topic, std::string payload);
  absl::StatusOr<std::string> Receive(absl::string_view topic, absl::Duration timeout);
  // One message of the topic will not be received: it is dropped, now or when it comes.
  void Discard(absl::string_view topic);

  // A message to all other ranks, given to their notice handler on their control thread.
  void Notify(absl::string_view topic, std::string payload);

  // Ends the group: the failure handler of every rank, this one included, gets `why` with this rank as the culprit.
  // Only the first failure of a group counts.
  void Fail(const absl::Status& why);
  // "ranks 1,3": who has not come to the exchange `sequence` of `topic`; empty if that can't be found out soon.
  std::string WhoIsMissing(absl::string_view topic, int64_t sequence);
  // From now on this rank's silence is no failure.
  void Leave();

  // This rank lives, and is there; more than `silence` without such a message means that it is lost.
  void Beat(std::string whereabouts, absl::Duration silence);
  // How many messages of the hub have been dealt with, heartbeats left out.
  int64_t received() const;

  // After a failure: waits until every rank of the group has come here, has left, or is lost.
  // Errors: DeadlineExceeded names the ranks that have done nothing of it; Unavailable: the hub is gone.
  struct Survivors {
    std::vector<int> ranks;  // In order; this one may be missing if the others took it for lost.
    int64_t round = 0;       // Equal on all of them; another one each time.
  };
  absl::StatusOr<Survivors> Regroup(absl::Duration timeout);

  const std::shared_ptr<internal::Waits>& waits() const { return waits_; }
  std::string WhoIsMissing(const internal::Wait& w) { return w.kind == internal::Wait::Kind::kExchange ? WhoIsMissing(w.topic, w.sequence) : ""; }
  ControlLink& link() { return *link_; }

  // Set once. The failure handler is called at most once, with every wait still open (it calls Close()); `culprit` is
  // -1 if the hub itself is gone. What came before they were set is given to them at once.
  void SetHandlers(std::function<void(int culprit, const absl::Status& why)> on_failure,
                   std::function<void(int from, absl::string_view topic, absl::string_view payload)> on_notice);
  // Ends every wait, now and later, with `why`. Local; tells nobody.
  void Close(const absl::Status& why);
  // Ends the connection: no handler or callback runs after it returns. Not to be called by one.
  void Stop();

 private:
  void OnMessage(ControlMessage message);
  void Handle(ControlMessage message);
  void OnLost(const absl::Status& why);

  // What a request waits for; what ends it early.
  enum class Until { kClosed, kLost };
  absl::StatusOr<ControlMessage> Request(ControlMessage message, absl::Duration timeout, Until until = Until::kClosed);

  const int rank_;
  const int world_size_;
  const std::unique_ptr<ControlLink> link_;
  const std::shared_ptr<internal::Waits> waits_ = internal::Waits::Create();

  mutable absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // The hub is gone.
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
