// The actions of the lowest active rank, in order, which ranks without input repeat.
//
//   StepLog log(rank, world_size, std::move(channel));
//   log.Add(step, StepEntry::Kind::kAction, "optimizer#0", payload);  // on an active rank
//   log.BecomeExhausted(step);                                        // its loop has ended
//   EK_ASSIGN_OR_RETURN(std::optional<std::string> call, log.NextCall(step + 1, from));
//   EK_ASSIGN_OR_RETURN(const StepEntry entry, log.NextIn(step + 1, from));
//
// Every active rank adds its entries, and keeps those of which it is not known yet which ranks lack
// them. A rank without input reports the last step that it took itself, and how many calls it has
// issued, by BecomeExhausted() and in its records (OnAnswer()): it lacks what came later. The
// lowest rank that does not lack an entry sends it to the ranks that do. So the sender changes when
// the lowest active rank becomes exhausted, and the next one goes on from the numbers in that
// report.
//
// Numbers: the user's calls are numbered over all loops. For a moment two ranks may send the same
//          calls: a rank that became exhausted learns late which ranks lack its last ones. Readers
//          drop duplicates, and report a gap as an error. Other entries are numbered within their
//          step, and have one sender.
// Order:   a call is read before the step that it was issued before, and not before an earlier one,
//          whose beginning on this rank others may wait for.
// Cost:    while all ranks are active nothing is sent, and nothing is kept beyond the step. An
// entry
//          is one message, however many ranks lack it. One message ends a loop.
// Threads: thread-safe; NextCall() and NextIn() are called by one thread at a time.
// Errors:  of the readers: those of Channel::Receive(), Internal for a gap, InvalidArgument for
// bytes
//          that are no entry.

#ifndef EVENKEEL_JOIN_STEPS_STEP_LOG_H_
#define EVENKEEL_JOIN_STEPS_STEP_LOG_H_

#include <cstdint>
#include <deque>
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
    kEnd,        // The step is over; no rank is active in it, if it has no other entry.
    kCall,       // A collective of the user's.
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
  // The way of entries between ranks: that of a group, or a test's.
  class Channel {
   public:
    virtual ~Channel() = default;
    // Sends to those ranks, which may include this one.
    virtual void Send(absl::Span<const int> to, std::string entry) = 0;
    // Passes the entry to OnNotice() of all other ranks.
    virtual void Notify(std::string entry) = 0;
    // Waits for the oldest entry that was sent to this rank and not received yet.
    virtual absl::StatusOr<std::string> Receive(const ControlChannel::From& from) = 0;
  };

  StepLog(int rank, int world_size, std::unique_ptr<Channel> channel)
      : rank_(rank), channel_(std::move(channel)), exhausted_(world_size) {}

  // A loop begins, or ends, on this rank after so many steps; all ranks have the same ones.
  void SetLoop(int64_t steps);
  void Add(int64_t step, StepEntry::Kind kind, absl::string_view participant,
           absl::string_view payload);
  // Returns the number of calls that this rank has issued or shadowed, in all loops.
  int64_t calls() const;
  // To be called when this rank's loop has ended, after its last step.
  void BecomeExhausted(int64_t step);

  // The records of all ranks for a step are there: the lowest active rank or -1, the calls that all
  // ranks have issued or shadowed, and the exhausted ranks with the number of their calls. In the
  // order of the steps.
  void OnAnswer(int64_t step, int leader, int64_t calls_of_all,
                absl::Span<const std::pair<int, int64_t>> exhausted);
  absl::Status OnNotice(int from, absl::string_view notice);

  // On an exhausted rank: waits for the next call that was issued before that step; nothing if the
  // step has begun and all calls before it have been returned. kDue: there is one more, whether the
  // step has begun or not.
  enum class Call { kIfAny, kDue };
  absl::StatusOr<std::optional<std::string>> NextCall(int64_t step,
                                                      const ControlChannel::From& from,
                                                      Call call = Call::kIfAny);
  // Waits for the next entry of that step from its lowest active rank, `from.rank`; not for calls
  // that NextCall() has returned.
  absl::StatusOr<StepEntry> NextIn(int64_t step, const ControlChannel::From& from);

 private:
  // The last step and the calls that an exhausted rank has issued itself.
  struct Position {
    int64_t step = 0;
    int64_t calls = 0;
  };
  struct PendingCall {
    int64_t step = 0;
    std::string text;
  };

  // Returns the ranks that are known to lack an entry of this rank, if it has to send it.
  std::vector<int> Receivers(const StepEntry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends what those ranks lack.
  void Learn(absl::Span<const std::pair<int, Position>> news) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Read(const ControlChannel::From& from);
  bool HasBegun(int64_t step) const;
  std::string TakeCall();

  const int rank_;
  const std::unique_ptr<Channel> channel_;

  mutable absl::Mutex mutex_;  // Held while entries are sent, which keeps their order.
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  // Entries of this rank that some rank may still lack; each was sent to its Receivers().
  std::deque<StepEntry> log_ ABSL_GUARDED_BY(mutex_);
  int64_t step_ ABSL_GUARDED_BY(mutex_) = 0;  // The last entry's, calls apart.
  int64_t next_in_step_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t loop_began_ ABSL_GUARDED_BY(mutex_) = 0;
  int last_leader_ ABSL_GUARDED_BY(mutex_) = 0;  // Ends the loop for all.
  int exhausted_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::optional<Position>> exhausted_ ABSL_GUARDED_BY(mutex_);  // By rank.

  // For the reader alone.
  std::deque<PendingCall> pending_;  // The calls from calls_ on.
  std::deque<StepEntry> entries_;    // In the order of their arrival, with the calls' places.
  int64_t read_step_ = 0;
  int64_t next_to_read_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_LOG_H_
