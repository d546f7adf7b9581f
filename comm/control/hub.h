// The middle of a group's control plane: it tracks which ranks are connected, what each has
// reached, and whether all can still reach the same point.
//
//   ControlHub hub(4, [&](absl::Span<const int> to, const ToRank& message) { ... });
//   hub.OnMessage(rank, message);
//   hub.OnDisconnect(rank);
//
// It is pure bookkeeping: transports pass it messages and deliver those that it sends. It ends the
// group, for all ranks and with one message, when a rank fails, is lost, is silent, or has left
// while others wait for it; when ranks have different collectives at the same position; or when
// ranks can only go on after each other (rank_status.h).
//
// A deadlock is reported after it has lasted for a moment, and after each rank in it has sent one
// more report: reports are taken from outside of the threads, and the instant in which a thread is
// being woken up must not count as a wait.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_CONTROL_HUB_H_
#define EVENKEEL_COMM_CONTROL_HUB_H_

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
#include "absl/types/span.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/failure_info.h"

namespace evenkeel::internal {

struct HubOptions {
  absl::Duration patience = absl::Seconds(1);  // How long a deadlock must last.
  bool admits_newcomers = false;               // OnNewcomers() and OnTime() will be called.
};

// A group at one moment, for observers.
struct HubView {
  struct Rank {
    bool has_left = false;
    bool is_lost = false;
    std::string doing;  // RankStatus::doing of its last report; empty: it has sent none.
    std::string details;
    int64_t waited_ms = 0;
    // The first 100 ranks whose part is missing from its longest wait.
    std::vector<int> waits_for;
  };
  absl::Status status;  // The error with which the group has ended.
  std::vector<Rank> ranks;
};

class ControlHub {
 public:
  // `deliver(to, message)` is called without any lock held.
  using DeliverFunction = std::function<void(absl::Span<const int> to, const ToRank& message)>;
  ControlHub(int world_size, DeliverFunction deliver, HubOptions options = {});

  int world_size() const { return world_size_; }
  void OnMessage(int rank, ToHub message);
  // The connection of `rank` has ended. Without an earlier Leave this is a failure of the rank.
  void OnDisconnect(int rank);
  // `rank` has been silent for that long, which is too long. Its connection will be ended.
  void OnSilence(int rank, absl::Duration silence);
  // `rank` has reported that it has received nothing from this hub for that long, although the hub
  // has run and not all ranks report this. Its connection will be ended.
  void OnDeafness(int rank, absl::Duration unheard);
  // Reports all places (numbers in the job) for which newcomers are ready, after each change. When
  // the ranks regroup, the hub gives newcomers the places of lost ranks, and no others: it then
  // delivers the Regrouped to these ranks, too.
  void OnNewcomers(std::set<int> places);
  // A newcomer that was given the place of `rank` was lost before it reached the new group.
  void OnNewcomerLost(int rank);
  // Called periodically: ends the wait for newcomers.
  void OnTime();
  bool AwaitsNewcomers() const;
  // Returns whether all ranks have agreed that the group is made (kMadeTopic).
  bool IsMade() const;
  // Returns the places that the last regrouping gave up.
  std::vector<int> PlacesLeftOut() const;
  HubView View();

 private:
  // The wait for newcomers: begins when the last survivor has come, and once again if another rank
  // is lost meanwhile.
  struct WaitForNewcomers {
    absl::Duration longest;  // The longest of those that the ranks ask for.
    int begins = 0;
    size_t lost = 0;  // The number of lost ranks when it began last.
    absl::Time ends = absl::InfiniteFuture();
  };
  struct Pending {  // An exchange that is not complete.
    std::vector<std::string> parts;
    std::vector<bool> arrived;
    int missing = 0;
  };
  // Asks all ranks whether they have come to an exchange: over a tree the hub receives that only
  // when a whole subtree has come. One poll per exchange runs at a time. All ranks that ask
  // meanwhile wait for the same next poll: n ranks that wait for a rank must not cause n * n
  // messages.
  struct Poll {
    int64_t id = 0;
    absl::Time start;
    std::map<int, int64_t> askers, next_askers;  // By rank: its request.
    std::vector<bool> answered;
    std::vector<bool> has_begun;
    int missing_answers = 0;
  };
  struct Suspicion {  // A suspected deadlock.
    std::set<int> stuck;
    absl::Time since;
    std::set<int> confirmed;  // Ranks that have reported again.
  };
  struct Outgoing {
    std::vector<int> to;
    ToRank message;
  };

  // Runs `handle()` with the lock held, then delivers what it has put into the outbox.
  template <typename Handler>
  void Deliver(Handler handle);
  void Handle(int rank, const to_hub::Beat& beat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, to_hub::Exchange part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, to_hub::Message message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, to_hub::Notice notice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, to_hub::Put put) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, const to_hub::Get& get) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, to_hub::WhoIsMissing question) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, const to_hub::PollReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, const to_hub::Failed& failed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, const to_hub::Leave&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Handle(int rank, const to_hub::Regroup& regroup) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // 0: the sender does not know it.
  void SetFanout(int fanout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts a poll for all ranks that have asked.
  void StartPoll(const ExchangeId& id, Poll& poll) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether every rank has replied, or cannot any more.
  bool IsComplete(const Poll& poll) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the result of the replies so far.
  absl::Status ResultOf(const Poll& poll) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndExchange(ExchangeId id, Pending& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `gone` has left, and will never come to the exchange in which the others are.
  void FailLeft(int gone, const std::vector<int>& waiting, const ExchangeId& id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `reporter` has just reported. Ends the group if the ranks contradict each other or are
  // deadlocked.
  void JudgeGroup(int reporter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsConfirmed(const std::set<int>& stuck, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int> AllRanks() const;
  // Replies to the ranks that request a new group, once no other rank can join it.
  void RegroupIfComplete() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the lost ranks whose places newcomers can take; none if no rank asks to wait.
  std::set<int> Replaceable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WaitsForNewcomers(size_t lost) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One of the ranks of the last Regrouped is lost: the others regroup again.
  void LoseSurvivor(int rank, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // "ranks 2,3 (rank 2 ...; rank 3 ...)".
  absl::Status NameMissing(const std::vector<int>& missing) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<OpenExchange> OpenExchanges() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tree of this group: a star until a rank states otherwise.
  TreeShape shape() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return {world_size_, fanout_}; }
  std::vector<int> MissingFromExchange(const ExchangeId& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Declares the rank lost: the texts continue "rank 2 ...".
  void Lose(int rank, absl::string_view to_it, absl::string_view to_others);
  // Ends the group. If it has ended, and the survivors wait for this rank in their new group, ends
  // their wait.
  void OnLost(int rank, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailAll(FailureKind kind, int culprit, absl::Status why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_size_;
  const DeliverFunction deliver_;
  const HubOptions options_;
  mutable absl::Mutex mutex_;
  std::vector<Outgoing> outbox_ ABSL_GUARDED_BY(mutex_);  // Empty while the lock is free.
  int fanout_ ABSL_GUARDED_BY(mutex_);  // The fanout of the tree; the world size if there is none.
  to_rank::Failed failure_ ABSL_GUARDED_BY(mutex_);  // OK: the group has not ended.
  std::set<int> left_ ABSL_GUARDED_BY(mutex_);
  std::set<int> lost_ ABSL_GUARDED_BY(mutex_);
  std::map<int, int64_t> regrouping_ ABSL_GUARDED_BY(mutex_);  // By rank: its request.
  int64_t regrouped_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_made_ ABSL_GUARDED_BY(mutex_) = false;
  // The ranks of the last Regrouped, including newcomers; empty once one of them is lost.
  std::set<int> survivors_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> places_ ABSL_GUARDED_BY(mutex_);  // By rank; empty: no rank has regrouped yet.
  std::set<int> newcomers_ ABSL_GUARDED_BY(mutex_);  // The places for which one is ready.
  WaitForNewcomers wait_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> places_left_out_ ABSL_GUARDED_BY(mutex_);
  std::map<ExchangeId, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  // Values and notices are kept until the group ends, because any rank may ask for a value, or send
  // an equal notice, until then. Both are few: a group publishes its NCCL id and an address per
  // inner rank of a tree, and a rank sends such a notice when it leaves.
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::pair<int, int64_t>>> waiting_
      ABSL_GUARDED_BY(mutex_);  // By key: rank, request.
  std::set<std::pair<std::string, std::string>> passed_on_
      ABSL_GUARDED_BY(mutex_);  // Notices that are passed on once: topic, payload.
  std::map<ExchangeId, Poll> polls_ ABSL_GUARDED_BY(mutex_);
  int64_t next_poll_ ABSL_GUARDED_BY(mutex_) = 0;

  std::vector<RankFacts> facts_ ABSL_GUARDED_BY(mutex_);  // By rank.
  int waiting_ranks_ ABSL_GUARDED_BY(mutex_) = 0;         // Ranks that wait, by their last reports.
  // By rank: the exchanges of a tree that it had begun, without a result, at its last heartbeat.
  std::vector<std::set<ExchangeId>> come_ ABSL_GUARDED_BY(mutex_);
  Suspicion suspicion_ ABSL_GUARDED_BY(mutex_);  // None if no rank is stuck.
  int reports_since_judgement_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time judge_again_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_HUB_H_
