// The agreement of a training step: one small record per rank and step, gathered and spread over the control plane.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, comm.steps().Enter(this, name, 0));
//   ...
//   EK_ASSIGN_OR_RETURN(StepAnswer answer, ticket->Wait());      // who is active, whether the ranks synchronise
//
// It replaces the small all-reduces that other systems add to each step: nothing of it is on the data plane. A rank
// that has run out of inputs sends records too, as a joined rank, and so learns what the active ranks do.
//
// A record also carries the rank's ledger (step_ledger.h): how many steps each part has finished, and by which
// settings. It is compared between all ranks, so no rank goes on after a step that another one left out or took
// differently.
//
// Size:    a record has 38 bytes, 37 for each participant (and its note), and the ledger's text: 38 + 37 + 62 = 137 for
//          a DataParallel and an Optimizer. Each rank sends one for each step, and receives all of them.
//
// Participants are the parts whose per-step state the ranks must agree on: reducers and sharded optimizers register
// themselves. In each step the states of all active ranks are compared; a joined rank whose state is older is not wrong
// but behind: the lowest active rank sends it the newer one.
//
// Threads: thread-compatible except where said; one thread per rank runs steps. Callbacks come on the control thread.
// Errors:  FailedPrecondition on every rank when active ranks disagree, naming ranks and values; the group ends then.

#ifndef EVENKEEL_COMM_STEP_CONTROL_H_
#define EVENKEEL_COMM_STEP_CONTROL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/followed_calls.h"
#include "evenkeel/comm/step_ledger.h"

namespace evenkeel {

// What one participant of one rank is about to do in a step.
struct ParticipantState {
  uint64_t name_hash = 0;      // Filled in by StepControl.
  uint64_t generation = 0;     // Of the plan.
  uint64_t schedule_hash = 0;  // Of the collectives that the step will issue.
  uint64_t mask_hash = 0;      // Of the set of trained parameters.
  bool sync = true;            // Whether gradients are reduced in this step.
  std::string note;            // For messages only: "frozen: fc1.weight, fc1.bias". Short; empty normally.

  // Whether a joined rank in this state can shadow a rank in `other`.
  bool SamePlan(const ParticipantState& other) const {
    return generation == other.generation && schedule_hash == other.schedule_hash && mask_hash == other.mask_hash;
  }
};

class StepParticipant {
 public:
  virtual ~StepParticipant() = default;
  // Equal on all ranks: comm.UniqueName("data_parallel").
  virtual const std::string& participant_name() const = 0;
  // A step begins on this active rank: bring the plan up to date and say what it is.
  virtual absl::StatusOr<ParticipantState> PrepareStep() = 0;
  // What it is, on a joined rank.
  virtual ParticipantState CurrentState() const = 0;
  // For ranks that are behind: everything that makes another rank's CurrentState() equal to this one's. Called on the
  // control thread, at any time.
  virtual std::string ExportState() const = 0;
  virtual absl::Status ImportState(absl::string_view state) = 0;
};

// Bits of what one rank asks of all in a step, or-ed over the ranks: StepControl::Request(), StepAnswer::requests. The
// library only carries them.
struct StepRequests {
  static constexpr uint32_t kStop = 1;      // After this step.
  static constexpr uint32_t kSave = 2;      // A checkpoint, after this step.
  static constexpr uint32_t kEvaluate = 4;  // After this step.
  static constexpr uint32_t kFirstOfUsers = 1u << 16;
};

// What one rank says when its step begins.
struct StepRecord {
  static constexpr uint8_t kVersion = 1;  // The first byte of the serialized form.
  static constexpr int64_t kNotSaid = -1;

  bool joined = false;         // Has run out of inputs.
  uint32_t requests = 0;       // StepRequests.
  int64_t samples = kNotSaid;  // That this rank brings, in this step and since it last said so.
  int64_t calls = 0;           // Of the user's that it has issued or followed: AnnounceCall().
  uint64_t scope_hash = 0;     // Of the RunJoined() that the rank is in: its list and options; 0: in none.
  std::string ledger;          // StepLedger::Serialize(); empty in an answer: it has been compared.
  std::vector<ParticipantState> participants;

  std::string Serialize() const;
  static absl::StatusOr<StepRecord> Parse(absl::string_view bytes);
};

// What all ranks know after all records are in. Equal on all ranks.
struct StepAnswer {
  int64_t step = 0;
  int world_size = 1;
  int active = 1;         // How many ranks have inputs.
  int lowest_active = 0;  // -1: none.
  int highest_active = 0;
  uint32_t requests = 0;       // Or of all.
  int64_t samples = 0;         // Sum over ranks; of an exhausted one, those not yet reported.
  int64_t samples_so_far = 0;  // The same of all steps of the group up to this one.
  std::shared_ptr<const std::vector<StepRecord>> records = nullptr;  // By rank; null in a step without agreement.

  const StepRecord& record(int rank) const { return (*records)[rank]; }
  bool everyone_active() const { return active == world_size; }
  // What the lowest active rank does with that participant; the neutral state if it is unknown.
  ParticipantState LeaderState(absl::string_view participant_name) const;
};

class StepTicket {
 public:
  // Blocks until all records are in; from any thread.
  absl::StatusOr<StepAnswer> Wait() const;
  // Runs on the control thread, or at once if the answer is there; always in the order of the calls. Must not block.
  void OnAnswer(std::function<void(const absl::StatusOr<StepAnswer>&)> callback);
  bool IsAnswered() const;

 private:
  friend class StepControl;
  StepTicket(int64_t step, bool is_dry, Communicator* comm)
      : step_(step), is_dry_(is_dry), comm_(comm), deadline_(absl::Now() + comm->timeout()) {}
  // The others are busy with something else than this step: it may take as long from now on.
  absl::Time Renew();
  void Resolve(absl::StatusOr<StepAnswer> answer);
  internal::Wait Describe() const;

  const int64_t step_;
  const bool is_dry_;
  Communicator* const comm_;
  mutable absl::Mutex mutex_;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<absl::StatusOr<StepAnswer>> answer_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<void(const absl::StatusOr<StepAnswer>&)>> callbacks_ ABSL_GUARDED_BY(mutex_);
  bool is_calling_back_ ABSL_GUARDED_BY(mutex_) = false;
};

// Something that the lowest active rank did in a step and that joined ranks must do too.
struct StepAction {
  enum class Kind : uint8_t {
    kEntered,  // The actor takes part in the step: Enter().
    kAction,   // Announce().
    kEnd,      // The step is over.
    kCall,     // A collective of the user's: AnnounceCall().
  };
  Kind kind = Kind::kEnd;
  std::string actor;  // Name of the Joinable that acts.
  std::string payload;
  int64_t number = 0;  // Of a kCall.
};

class StepControl {
 public:
  explicit StepControl(Communicator* comm) : comm_(comm), calls_(&comm->control()) {}

  // Registration is local, in the same order on all ranks.
  void Register(StepParticipant* participant);
  void Unregister(StepParticipant* participant);

  // `who` takes part in the current step. A new step begins, and its record is sent, if there is none, or `who` has
  // taken part in this one already, or somebody of a later phase has (gradients: 0, optimizers: last). At most 64
  // steps may be unanswered; then it waits. Joined ranks learn, in the order of these calls, that the actor called
  // `name` takes part.
  absl::StatusOr<std::shared_ptr<StepTicket>> Enter(const void* who, absl::string_view name, int phase);
  // A joined rank's next step, or meeting.
  absl::StatusOr<std::shared_ptr<StepTicket>> EnterJoined(bool is_meeting = false);
  // All ranks meet between two steps, in place of a step: this one with inputs, the others with EnterJoined(true). It
  // has no participants; nobody follows anybody in it, and samples are left for the next step.
  absl::StatusOr<std::shared_ptr<StepTicket>> EnterMeeting();
  // Whether Enter() would begin a new step.
  bool WillBegin(const void* who, int phase) const {
    return ended_ || entered_.contains(who) || phase < entered_phase_;
  }
  // Joined rank: brings every participant to the state that the lowest active rank has in this step.
  absl::Status CatchUp(const StepAnswer& answer);
  // The step that Enter() last began on this rank; null before the first.
  std::shared_ptr<StepTicket> current() const { return current_; }

  // On the lowest active rank, while ranks are joined: has them do the same. Elsewhere, and while all ranks are active,
  // it does nothing. Does not wait: while the answer is on its way, so is the announcement.
  absl::Status Announce(absl::string_view actor, absl::string_view payload);
  // Joined rank: the next thing that the lowest active rank did in step `answer.step`.
  absl::StatusOr<StepAction> NextAction(const StepAnswer& answer);
  // Collectives of the user's that dry ranks follow, wherever the loop issues them (comm/followed_calls.h). Active
  // rank: before it issues one. Dry rank: the next one of those that come before the ticket's step; nothing: that has
  // begun, and all before it have been taken. TakeCall() tells whether one that NextAction() brought is still to be
  // followed.
  void AnnounceCall(const std::string& call);
  absl::StatusOr<std::optional<std::string>> NextCall(const std::shared_ptr<StepTicket>& ticket);
  bool TakeCall(const StepAction& action) { return calls_.Take(action.number); }
  void OnCallNotice(int from, absl::string_view notice) { calls_.OnNotice(from, notice); }
  // This rank's loop has ended: it follows the others' calls from now on.
  void RunDry() { calls_.RunDry(); }

  // The current step is over on this rank; Enter() does it by itself. Idempotent.
  void EndStep();

  // The same without a word to joined ranks: all ranks have ended the step early.
  void AbandonStep() { ended_ = true; }

  // Who runs the loop at the moment; null outside of RunJoined().
  void SetScope(const void* scope, uint64_t hash) {
    scope == nullptr ? calls_.EndLoop() : calls_.BeginLoop();
    if (scope == nullptr) samples_ = StepRecord::kNotSaid;  // No other loop's.
    absl::MutexLock lock(&mutex_);
    active_ranks_.clear();
    scope_ = scope;
    scope_hash_ = hash;
  }
  const void* scope() const { return scope_; }
  // The loop goes on in another group: its scope, its settings, what this rank has said for its next record, and what
  // it still says here while that group lives. `rank_there`: by rank, its rank in that group; -1: it has none.
  void ContinueIn(StepControl& next, const std::vector<int>& rank_there);
  // It has come back from that group, with what was said there and did not go out any more.
  void ComeBackFrom(StepControl& other);
  // Whether records are sent at all. Off inside RunJoined with enable = false: steps then have no agreement.
  void SetAgreement(bool on) { agreement_ = on; }
  bool agreement() const { return agreement_; }
  // Whether active ranks have to say how many samples they bring: a step without it is an error on all ranks.
  void RequireSamples(bool on) { requires_samples_ = on; }
  // For the next record that this rank sends: brings so many samples more.
  void AddSamples(int64_t samples);
  void Request(uint32_t bits);

  // The steps that this rank's parts have finished, for its next record.
  StepLedger& ledger() { return ledger_; }

  // Names of those who came from another group with theirs: false if somebody here has that name. Whoever leaves gives
  // its name back.
  bool HoldName(absl::string_view name);
  void ReleaseName(absl::string_view name);
  // Ends with this object: for those who may outlive the group that they were in.
  std::weak_ptr<const void> lifetime() const { return lifetime_; }

  // Steps that this rank has told the others of, as an active or a joined rank.
  int64_t records_sent() const { return records_sent_; }
  // Those, and the steps without agreement.
  int64_t steps_begun() const { return steps_begun_; }
  // Who had inputs in the last step that all ranks have begun, as far as this rank knows. All, before the first.
  std::vector<int> active_ranks() const;
  // Whether this rank's last step was a joined one.
  bool is_dry() const { return is_dry_; }

 private:
  std::vector<StepParticipant*> participants() const;
  absl::StatusOr<std::shared_ptr<StepTicket>> Begin(StepRecord record);
  void OnRecords(int64_t step, StepTicket& ticket, const absl::StatusOr<std::vector<std::string>>& parts);
  void HelpThoseBehind(const StepAnswer& answer);
  void TellJoined(StepAction::Kind kind, absl::string_view actor, absl::string_view payload);

  Communicator* const comm_;
  FollowedCalls calls_;
  StepLedger ledger_;
  const std::shared_ptr<const void> lifetime_ = std::make_shared<char>();
  mutable absl::Mutex mutex_;
  std::vector<StepParticipant*> participants_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string, std::less<>> held_names_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<StepTicket> current_;
  std::deque<std::shared_ptr<StepTicket>> unanswered_;
  std::set<const void*> entered_;  // Who takes part in the current step, and the latest of their phases.
  int entered_phase_ = 0;
  bool ended_ = true;
  const void* scope_ = nullptr;
  uint64_t scope_hash_ = 0;
  bool agreement_ = true;
  std::atomic<bool> is_dry_ = false;       // Also read by whoever asks what threads wait for.
  std::atomic<int64_t> records_sent_ = 0;  // Also read by the control thread.
  int64_t steps_begun_ = 0;
  int64_t samples_ = StepRecord::kNotSaid;
  uint32_t requests_ = 0;
  StepControl* next_ = nullptr;                 // Where the loop goes on,
  std::weak_ptr<const void> next_lives_;        // as long as that is there.
  std::atomic<bool> requires_samples_ = false;  // Also read by the control thread.
  int64_t samples_so_far_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<int> active_ranks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_STEP_CONTROL_H_
