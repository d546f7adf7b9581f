// The agreement of a training step: one small record per rank and step, gathered and spread over
// the control plane.
//
//   StepControl& steps = StepControl::Of(comm);                      // one for each communicator
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, steps.Enter(name, 0));
//   ...
//   // the active ranks, the requests of all ranks, ...
//   EK_ASSIGN_OR_RETURN(StepAnswer answer, ticket->Wait());
//
// It replaces the small all-reduces that other systems add to each step: nothing of it is on the
// data plane. An exhausted rank sends records too, and repeats the actions of the lowest active
// rank (step_log.h).
//
// Participants are the parts whose per-step state the ranks must agree on: reducers and sharded
// optimizers register themselves. In each step all ranks, also exhausted ones, have the same
// participants in the same order; so they are created and destroyed between the same steps on all
// ranks. The states of all active ranks are compared. An older state on an exhausted rank is not an
// error: the lowest active rank sends it the newer state.
//
// Threads: thread-compatible except where said; one thread per rank runs steps. Callbacks come on
//          the control thread.
// Errors:  FailedPrecondition on every rank when active ranks disagree, naming ranks and values;
//          the group ends then.

#ifndef EVENKEEL_JOIN_STEPS_STEP_CONTROL_H_
#define EVENKEEL_JOIN_STEPS_STEP_CONTROL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
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
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/group_extension.h"
#include "evenkeel/join/steps/interval_samples.h"
#include "evenkeel/join/steps/phase_clock.h"
#include "evenkeel/join/steps/step_agreement.h"
#include "evenkeel/join/steps/step_ledger.h"
#include "evenkeel/join/steps/straggler_detector.h"

namespace evenkeel {

class StepControl;
class StepLog;     // step_log.h
struct StepEntry;  // step_log.h

class StepParticipant {
 public:
  virtual ~StepParticipant() = default;
  // Equal on all ranks: comm.UniqueName("data_parallel").
  virtual const std::string& participant_name() const = 0;
  // Updates the plan and returns the state, when a step begins on this active rank.
  virtual absl::StatusOr<ParticipantState> PrepareStep() = 0;
  // Returns the state on an exhausted rank.
  virtual ParticipantState CurrentState() const = 0;
  // Returns all that ImportState() needs on a rank that is behind, so that its CurrentState()
  // becomes equal to this rank's. Called on the control thread, at any time.
  virtual std::string ExportState() const = 0;
  virtual absl::Status ImportState(absl::string_view state) = 0;
};

class StepTicket {
 public:
  // Waits until all records have arrived; from any thread.
  absl::StatusOr<StepAnswer> Wait() const;
  // Runs `callback`, which must not block, on the control thread, or at once if the answer is
  // known; always in the order of the calls.
  void OnAnswer(std::function<void(const absl::StatusOr<StepAnswer>&)> callback);
  bool IsAnswered() const { return GivenAnswer() != nullptr; }

 private:
  friend class StepControl;
  StepTicket(int64_t step, bool is_exhausted, StepControl* control, std::string why = "",
             std::shared_ptr<const ParticipantNames> names = nullptr,
             std::shared_ptr<const StepShares> shares = nullptr);
  // Restarts the timeout, because the other ranks are making progress before this step.
  void Renew();
  void Resolve(absl::StatusOr<StepAnswer> answer);
  // Returns null before the answer is known; never changes afterwards.
  const absl::StatusOr<StepAnswer>* GivenAnswer() const;
  internal::Wait Describe() const;

  const int64_t step_;
  const bool is_exhausted_;
  StepControl* const control_;
  const std::string why_;                                // This rank began it; empty: as usual.
  const std::shared_ptr<const ParticipantNames> names_;  // For the states in the record.
  const std::shared_ptr<const StepShares> shares_;       // Those of the record; null: none.
  mutable absl::Mutex mutex_;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<absl::StatusOr<StepAnswer>> answer_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<void(const absl::StatusOr<StepAnswer>&)>> callbacks_
      ABSL_GUARDED_BY(mutex_);
  bool is_calling_back_ ABSL_GUARDED_BY(mutex_) = false;
};

class StepControl final : public internal::GroupExtension {
 public:
  // Returns the communicator's StepControl. The communicator makes it at the first call, and owns
  // it. From any thread.
  static StepControl& Of(Communicator& comm);
  explicit StepControl(Communicator* comm);
  ~StepControl() override;

  // Local; called between the same steps and in the same order on all ranks.
  void Register(StepParticipant* participant);
  void Unregister(StepParticipant* participant);

  // Makes the object of that name take part in the current step. Begins a new step, and sends its
  // record, if there is none, or if that object or one of a later phase (gradients: 0, optimizers:
  // last) takes part in the current one already. Waits if 64 steps have no answer yet. Exhausted
  // ranks receive the name of each object that takes part, in the order of these calls.
  absl::StatusOr<std::shared_ptr<StepTicket>> Enter(absl::string_view name, int phase);
  // Begins the next step of an exhausted rank.
  absl::StatusOr<std::shared_ptr<StepTicket>> EnterJoined() { return Begin(As::kExhausted); }
  // Returns whether Enter() would begin a new step.
  bool WillBegin(absl::string_view name, int phase) const {
    return ended_ || entered_.contains(name) || phase < entered_phase_;
  }
  // On an exhausted rank: brings every participant to the state that the lowest active rank has in
  // this step.
  absl::Status CatchUp(const StepAnswer& answer);
  // The step that Enter() last began on this rank; null before the first.
  std::shared_ptr<StepTicket> current() const { return current_; }

  // Adds an action of that object to the log, which the lowest active rank sends to exhausted
  // ranks. Does not wait.
  absl::Status Announce(absl::string_view name, absl::string_view payload);
  // On an exhausted rank: waits for the next entry of the lowest active rank in step `answer.step`.
  absl::StatusOr<StepEntry> NextEntry(const StepAnswer& answer);
  // For the user's collectives, which exhausted ranks shadow wherever the loop issues them. An
  // active rank calls AnnounceCall() before it issues one. On an exhausted rank NextCall() returns
  // the next collective before the ticket's step; nullopt if the step has begun and all collectives
  // before it have been taken. Those in a step are entries of the step.
  void AnnounceCall(const std::string& call);
  absl::StatusOr<std::optional<std::string>> NextCall(const std::shared_ptr<StepTicket>& ticket);
  // Called when this rank's loop has ended: from now on it shadows the other ranks.
  void BecomeExhausted();

  // Ends the current step on this rank; Enter() does so, too. Idempotent. `why` is for the message
  // if the other ranks do not end it.
  void EndStep(std::string why = "");

  // Does the same without a message to exhausted ranks, when all ranks have ended the step early.
  void AbandonStep() { ended_ = true; }

  // Begins the loop of a RunJoined() with that hash of its list and options; std::nullopt: ends it.
  void SetLoop(std::optional<uint64_t> hash);
  bool in_loop() const { return loop_hash_.has_value(); }
  // Sets whether records are sent at all. Off inside RunJoined() with enable = false: steps then
  // have no agreement.
  void SetAgreement(bool on) { agreement_ = on; }
  bool agreement() const { return agreement_; }
  // Sets whether active ranks must call AddSamples() before each step; a step without it is an
  // error on all ranks.
  void RequireSamples(bool on) { requires_samples_ = on; }
  bool requires_samples() const { return requires_samples_; }
  // Adds samples, or requests, to this rank's next record.
  void AddSamples(int64_t samples);
  void Request(uint32_t bits);
  // Returns the samples in this rank's last record; StepRecord::kNotSaid: AddSamples() was not
  // called.
  int64_t last_samples() const { return last_samples_; }
  // Returns whether AddSamples() was called since then.
  bool has_more_samples() const { return samples_ != StepRecord::kNotSaid; }
  // Returns the samples added since then, and takes them out of the next record.
  int64_t TakeSamples() { return std::exchange(samples_, StepRecord::kNotSaid); }

  // Sets the division of the next step's batch, which this rank's next record reports; null drops
  // it.
  void SetShares(std::shared_ptr<const StepShares> shares) { shares_ = std::move(shares); }
  // Returns the division that no record has reported yet; null if there is none.
  const std::shared_ptr<const StepShares>& shares() const { return shares_; }
  // Returns the last step of this rank that reduces gradients; null before the first.
  const std::shared_ptr<StepTicket>& last_reduction() const { return last_reduction_; }
  // Receives the answers on which all ranks agree, on the control thread, in the order of the
  // steps, each before its ticket has it. `samples`: those of the interval whose times the records
  // have, by rank. There is one observer at a time, which must neither block nor use this object;
  // null ends it.
  using Observer = std::function<void(const StepAnswer&, absl::Span<const int64_t> samples)>;
  void SetObserver(Observer observer) {
    absl::MutexLock lock(&mutex_);
    observer_ = std::move(observer);
  }
  bool has_observer() const {
    absl::MutexLock lock(&mutex_);
    return observer_ != nullptr;
  }

  // For objects that keep their name when they come from another group. HoldName() returns false if
  // an object of this group holds that name; an object that leaves the group releases it.
  bool HoldName(absl::string_view name);
  void ReleaseName(absl::string_view name);
  // Expires with this object: for objects that may outlive their group.
  std::weak_ptr<const void> lifetime() const { return lifetime_; }

  // Returns the ledger of the steps that this rank's parts have finished, which Finalize() compares
  // between the ranks. For the thread that runs steps.
  StepLedger& ledger() { return ledger_; }
  // Returns the number of records that this rank has sent, active or exhausted.
  int64_t records_sent() const { return records_sent_; }
  // Returns the same number plus the steps without agreement.
  int64_t steps_begun() const { return steps_begun_; }
  // Returns the ranks with inputs in the last step that all ranks have begun, to this rank's
  // knowledge; all ranks before the first step.
  std::vector<int> active_ranks() const;

  // Measures this rank's steps. Thread-safe.
  PhaseClock& phases() { return phases_; }
  // Calls `use` with the detector that has the times of all ranks. From any thread.
  template <typename Use>
  auto WithStragglers(Use use) {
    absl::MutexLock lock(&mutex_);
    return use(stragglers_);
  }

  void OnNotice(int from, absl::string_view topic, absl::string_view notice) override;
  int64_t position() const override { return records_sent_; }
  // Returns whether this rank shadowed the last step.
  bool is_exhausted() const override { return is_exhausted_; }
  std::string StatusJson() const override;
  std::string FinalState() const override;
  absl::Status CompareFinalStates(absl::Span<const std::string> states) const override;

 private:
  friend class StepTicket;  // Waits as a part of the group.
  std::vector<StepParticipant*> participants() const;
  enum class As { kActive, kExhausted };  // How this rank begins a step.
  struct NewRecord {
    StepRecord record;
    std::shared_ptr<const ParticipantNames> names;  // Of its participants.
    std::shared_ptr<const StepShares> shares;
  };
  // Returns this rank's record of the next step, without the fields that Begin() adds.
  absl::StatusOr<NewRecord> MakeRecord(As as);
  absl::StatusOr<std::shared_ptr<StepTicket>> Begin(As as);
  void OnRecords(int64_t step, const std::shared_ptr<StepTicket>& ticket,
                 const absl::StatusOr<std::vector<std::string>>& parts);
  // Exchanges the StepDetails of all ranks, and ends the group with the error that they show.
  void ShowDetails(const StepAnswer& answer, const std::shared_ptr<StepTicket>& ticket);
  void UpdateNames() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the samples of the interval whose times the records have, by rank.
  absl::Span<const int64_t> AddTimes(const StepAnswer& answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HelpThoseBehind(const StepAnswer& answer);

  const std::unique_ptr<StepLog> log_;
  const std::shared_ptr<const void> lifetime_ = std::make_shared<char>();
  PhaseClock phases_;

  mutable absl::Mutex mutex_;
  std::vector<StepParticipant*> participants_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const ParticipantNames> names_ ABSL_GUARDED_BY(mutex_);  // Theirs.
  uint64_t names_hash_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::string, std::less<>> held_names_ ABSL_GUARDED_BY(mutex_);
  StragglerDetector stragglers_ ABSL_GUARDED_BY(mutex_);
  IntervalSamples interval_samples_ ABSL_GUARDED_BY(mutex_);
  Observer observer_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> active_ranks_ ABSL_GUARDED_BY(mutex_);

  // Written by the thread that runs steps, and read by the control thread and by observers.
  std::atomic<bool> is_exhausted_ = false;
  std::atomic<int64_t> records_sent_ = 0;
  std::atomic<bool> requires_samples_ = false;

  // For the thread that runs steps alone.
  StepLedger ledger_;
  std::shared_ptr<StepTicket> current_;
  std::shared_ptr<StepTicket> last_reduction_;
  std::shared_ptr<const StepShares> shares_;
  std::deque<std::shared_ptr<StepTicket>> unanswered_;
  // The objects that take part in the current step, and the latest of their phases.
  std::set<std::string, std::less<>> entered_;
  int entered_phase_ = 0;
  bool ended_ = true;
  std::string why_ended_;
  std::optional<uint64_t> loop_hash_;  // Inside RunJoined().
  bool agreement_ = true;
  int64_t steps_begun_ = 0;
  int64_t samples_ = StepRecord::kNotSaid;
  int64_t last_samples_ = StepRecord::kNotSaid;
  uint32_t requests_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_CONTROL_H_
