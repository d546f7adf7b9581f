// The middle of a group's control plane: who is there, who has come to what, and whether all can still come together.
//
//   ControlHub hub(4, [&](int rank, ControlMessage message) { ... });
//   hub.OnMessage(rank, message);
//   hub.OnDisconnect(rank);
//
// Pure bookkeeping: transports bring it messages and take away what it wants sent. It ends the group, for all ranks and
// with one sentence, when a rank fails, is lost, is silent, has left where others wait for it, has another collective
// than others at the same position, or can only go on after others that can only go on after it (whereabouts.h).
//
// A deadlock is let stand for a moment, and until each of those in it has reported once more: reports are taken from
// the outside, and nobody is accused for the instant in which a thread is being woken up.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_INTERNAL_CONTROL_HUB_H_
#define EVENKEEL_COMM_INTERNAL_CONTROL_HUB_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control_link.h"
#include "evenkeel/comm/internal/exchange_tree.h"
#include "evenkeel/comm/internal/whereabouts.h"

namespace evenkeel::internal {

struct HubOptions {
  absl::Duration patience = absl::Seconds(1);  // How long a deadlock has to stand.
  // After a judgement that took longer than a millisecond, as in large groups, the hub does other things for so many
  // times as long.
  int rest = 20;
};

class ControlHub {
 public:
  // `deliver(rank, message)` is called without any lock held.
  ControlHub(int world_size, std::function<void(int rank, ControlMessage message)> deliver, HubOptions options = {});

  int world_size() const { return world_size_; }
  void OnMessage(int rank, ControlMessage message);
  // The connection of `rank` has ended. Without a kLeave before it, that is a failure of the rank.
  void OnDisconnect(int rank);
  // Nothing was heard of `rank` for that long, which is too long: its connection will be ended.
  void OnSilence(int rank, absl::Duration silence);

 private:
  struct Pending {  // An exchange that is not complete.
    std::vector<std::string> parts;
    std::vector<bool> arrived;
    int missing = 0;
  };
  struct Poll {  // Of all ranks, whether they have come to an exchange: a tree brings that only when a subtree has.
    int asker = -1;
    int64_t request = 0;
    Wait wait;
    std::vector<bool> answered;
    std::vector<bool> has_come;
  };
  struct Suspicion {  // Of a deadlock.
    std::set<int> stuck;
    absl::Time since;
    std::set<int> confirmed;  // Those of `stuck` that have reported again.
  };
  using Outbox = std::vector<std::pair<int, ControlMessage>>;

  // Runs `handle(outbox)` with the lock, and then delivers.
  template <typename Handler>
  void Deliver(Handler handle);
  void Handle(int rank, ControlMessage message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleBeat(int rank, const ControlMessage& beat, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleExchange(int rank, ControlMessage message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleMissing(int rank, const ControlMessage& message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleHaveCome(int rank, const ControlMessage& message, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers it if everybody has, or can't any more, or need not.
  void FinishPoll(int64_t id, bool now, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleLeave(int rank, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `reporter` has just reported: ends the group if the ranks can't come together.
  void JudgeGroup(int reporter, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsConfirmed(int reporter, const std::set<int>& stuck, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers those that want a new group, once nobody else can come.
  void RegroupIfComplete(Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // "ranks 2,3 (rank 2 ...; rank 3 ...)".
  std::string NameMissing(const std::vector<int>& missing) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<OpenExchange> OpenExchanges() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Who stands where in this group: a star until a rank says otherwise.
  TreeShape shape() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return {world_size_, fanout_}; }
  std::vector<int> MissingFromExchange(const std::string& topic, int64_t sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailAll(int culprit, absl::StatusCode code, std::string message, Outbox& outbox)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_size_;
  const std::function<void(int, ControlMessage)> deliver_;
  const HubOptions options_;
  absl::Mutex mutex_;
  int fanout_ ABSL_GUARDED_BY(mutex_);              // Of the tree; the world size: none.
  ControlMessage failure_ ABSL_GUARDED_BY(mutex_);  // Code not OK: the group has ended, and this told why.
  std::set<int> left_ ABSL_GUARDED_BY(mutex_);
  std::set<int> lost_ ABSL_GUARDED_BY(mutex_);
  std::map<int, int64_t> regrouping_ ABSL_GUARDED_BY(mutex_);  // Rank, its request.
  int64_t regrouped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::pair<std::string, int64_t>, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::pair<int, int64_t>>> waiting_ ABSL_GUARDED_BY(mutex_);  // key: rank, request.

  std::map<int64_t, Poll> polls_ ABSL_GUARDED_BY(mutex_);  // By number.
  int64_t next_poll_ ABSL_GUARDED_BY(mutex_) = 0;

  std::vector<RankFacts> facts_ ABSL_GUARDED_BY(mutex_);  // By rank.
  // By rank: the exchanges of a tree that it had come to, and had no answer to, at its last heartbeat.
  std::vector<std::set<std::pair<std::string, int64_t>>> come_ ABSL_GUARDED_BY(mutex_);
  Suspicion suspicion_ ABSL_GUARDED_BY(mutex_);  // Nobody stuck: none.
  absl::Time judge_again_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_CONTROL_HUB_H_
