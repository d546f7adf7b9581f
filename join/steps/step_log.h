// The log of the lowest active rank's actions, in order, which exhausted ranks repeat.
//
//   StepLog log(rank, world_size, std::move(channel));
//   log.Add(step, StepEntry::Kind::kAction, "optimizer#0", payload);  // on an active rank
//   log.BecomeExhausted(step);                                        // its loop has ended
//   EK_ASSIGN_OR_RETURN(std::optional<std::string> call, log.NextCall(step + 1, from));
//   EK_ASSIGN_OR_RETURN(const StepEntry entry, log.NextIn(step + 1, from));
//
// Every active rank adds the same entries to its log, and keeps each until the answer of its step
// shows which ranks lack it. An exhausted rank reports its last step and the number of calls that
// it has issued, in BecomeExhausted() and in its records (OnAnswer()); it lacks all later entries.
// The lowest rank that does not lack an entry sends it to the ranks that do. When that rank becomes
// exhausted, the next one continues from the numbers in its report.
//
// Numbers: the user's calls are numbered over all loops. For a moment two ranks may send the same
//          calls, because a rank that became exhausted learns late which ranks lack its last calls.
//          Readers drop duplicates, and report a gap as an error. Other entries are numbered within
//          their step, and have one sender.
// Order:   a call is returned before the step that follows it, but not before an earlier step:
//          other ranks may wait for the beginning of that step on this rank.
// Cost:    while all ranks are active nothing is sent, and nothing is kept beyond the step. An
//          entry is one message, however many ranks lack it. One message ends a loop.
// Threads: thread-safe; NextCall() and NextIn() are called by one thread at a time.
// Errors:  readers return those of Channel::Receive(), Internal for a gap, and InvalidArgument for
//          bytes that are not a valid entry.

#ifndef EVENKEEL_JOIN_STEPS_STEP_LOG_H_
#define EVENKEEL_JOIN_STEPS_STEP_LOG_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

struct StepEntry {
  enum class Kind : uint8_t {
    kEntered,    // The participant takes part in the step.
    kAction,     // An action of the participant.
    kEnd,        // The step is over. If it is the only entry, no rank was active in the step.
    kCall,       // A user's collective.
    kExhausted,  // The sender has run out of input.
  };
  Kind kind = Kind::kEnd;
  int32_t rank = 0;         // The sender.
  int64_t step = 0;         // The number of steps that the sender had begun.
  int64_t number = 0;       // kExhausted: the number of calls that the sender has issued.
  std::string participant;  // Empty for calls.
  std::string payload;

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.kind, Kind::kExhausted), self.rank, self.step, self.number,
          self.participant, self.payload);
  }
};

class StepLog {
 public:
  // Transmits entries between ranks: the control plane of a group, or a test's substitute.
  class Channel {
   public:
    virtual ~Channel() = default;
    // Sends the entry to the ranks in `to`, which may include this one.
    virtual void Send(absl::Span<const int> to, std::string entry) = 0;
    // Passes the entry to OnNotice() of all other ranks.
    virtual void Notify(std::string entry) = 0;
    // Waits for the oldest entry that was sent to this rank and not received yet.
    virtual absl::StatusOr<std::string> Receive(const ControlChannel::From& from) = 0;
  };

  StepLog(int rank, int world_size, std::unique_ptr<Channel> channel)
      : rank_(rank), world_size_(world_size), channel_(std::move(channel)) {}

  // Begins a loop on this rank, or ends it, after `steps` steps; their number is equal on all
  // ranks.
  void SetLoop(int64_t steps);
  void Add(int64_t step, StepEntry::Kind kind, absl::string_view participant,
           absl::string_view payload);
  // Returns the number of calls that this rank has issued or shadowed, in all loops.
  int64_t calls() const;
  // Reports to all other ranks that this rank's loop has ended, after its last step.
  void BecomeExhausted(int64_t step);

  // Handles the records of all ranks for a step; called in the order of the steps. `leader`: the
  // lowest active rank, or -1. `calls_of_all`: how many calls every rank has issued or shadowed.
  // `exhausted`: the exhausted ranks, each with the number of its calls.
  void OnAnswer(int64_t step, int leader, int64_t calls_of_all,
                absl::Span<const std::pair<int, int64_t>> exhausted);
  // Handles the BecomeExhausted() of another rank.
  absl::Status OnNotice(int from, absl::string_view notice);

  // On an exhausted rank: waits for the next call that was issued before that step, and returns it;
  // std::nullopt if the step has begun and all calls before it have been returned. With kDue the
  // caller knows that one more call was issued, whether the step has begun or not.
  enum class Call { kIfAny, kDue };
  absl::StatusOr<std::optional<std::string>> NextCall(int64_t step,
                                                      const ControlChannel::From& from,
                                                      Call call = Call::kIfAny);
  // Waits for the next entry of that step from its lowest active rank, `from.rank`. Omits calls
  // that NextCall() has returned.
  absl::StatusOr<StepEntry> NextIn(int64_t step, const ControlChannel::From& from);

 private:
  // The last step of an exhausted rank, and the number of calls that it has issued itself.
  struct Position {
    int64_t step = 0;
    int64_t calls = 0;
  };
  using Positions = std::map<int, Position>;  // By rank.

  absl::StatusOr<StepEntry> Parse(absl::string_view bytes) const;
  // Sends an entry to the ranks of `exhausted` that lack it, if this rank is its sender.
  void Send(const StepEntry& entry, const Positions& exhausted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Records the positions, and sends those ranks the entries that they lack.
  void Learn(const Positions& news) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateLowest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Read(const ControlChannel::From& from);
  bool HasBegun(int64_t step) const;
  void CountCall();

  const int rank_;
  const int world_size_;
  const std::unique_ptr<Channel> channel_;

  mutable absl::Mutex mutex_;  // Held while entries are sent, which keeps their order.
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  // Entries of this rank that some rank may still lack. Those that this rank has to send have been
  // sent to the ranks in exhausted_.
  std::deque<StepEntry> log_ ABSL_GUARDED_BY(mutex_);
  int64_t step_ ABSL_GUARDED_BY(mutex_) = 0;  // Of the last entry that is not a call.
  int64_t next_in_step_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t loop_began_ ABSL_GUARDED_BY(mutex_) = 0;
  int last_leader_ ABSL_GUARDED_BY(mutex_) = 0;  // Ends the loop for all.
  Positions exhausted_ ABSL_GUARDED_BY(mutex_);
  // The lowest rank that is not in exhausted_ (this rank never is), and the latest of the last
  // steps of the ranks below it. Thousands of ranks may become exhausted together: only a rank that
  // has entries to send may search them.
  int lowest_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t lower_step_ ABSL_GUARDED_BY(mutex_) = 0;

  // Used by the reader only.
  std::deque<StepEntry> entries_;  // In the order of their arrival.
  int64_t next_call_ = 0;          // The number after those of the calls that were received.
  int64_t read_step_ = 0;
  int64_t next_to_read_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_LOG_H_
