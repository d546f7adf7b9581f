// What a part of training must be, so that RunJoined() can keep it going on ranks that have run out of inputs.
//
//   class Counter : public Joinable {
//    public:
//     explicit Counter(Communicator* comm) : Joinable(comm, "counter") {}
//     absl::Status Count() {                                       // used in each step of the loop
//       EK_RETURN_IF_ERROR(Notify().status());
//       return channel_->AllReduce(ones_, ReduceOp::kSum).Wait();
//     }
//     absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override;   // its MainHook adds zeros
//   };
//
// After its group has ended, or for another one, a Joinable goes on where it is: ReplaceGroup(), or Recover() of
// recovery.h, which also makes the ranks' state equal. Override LeaveGroup() and EnterGroup() to take channels of the
// new one.
//
// Ownership: the communicator outlives the Joinable's use; a Joinable outlives the RunJoined() it is given to.
// Threads:   thread-compatible.
// Source:    the generic Join of PyTorch (#61555), with one control record per step instead of its small all-reduces.

#ifndef EVENKEEL_JOIN_JOINABLE_H_
#define EVENKEEL_JOIN_JOINABLE_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/step_divisor.h"

namespace evenkeel {

struct JoinOptions {
  // False: inputs are known to be even. No records, no checks; gradients are divided by the full world size.
  bool enable = true;
  // All ranks stop at the first step that one of them has no input for: RunJoined() answers OutOfRange on every rank.
  bool throw_on_early_termination = false;
  // All ranks stop likewise in the first step in which fewer than so many have inputs. Dry ranks end as after the whole
  // loop. 1: nobody stops early; the group's size: the same as throw_on_early_termination.
  int min_active_ranks = 1;
  // A rank that has shadowed so many steps leaves: the others go on in a group without it, of which it hears nothing
  // but that it lives, and it comes back when the loop ends on all of them, with the state of the highest rank that had
  // inputs to the end. For inputs so uneven that shadowing costs more than that: moving the whole state twice. All
  // Joinables of the list must be able to (Joinable::can_leave()). Results are those of shadowing.
  int64_t leave_after_shadow_steps = std::numeric_limits<int64_t>::max();
  // By what the sum of the ranks' gradients is divided.
  DivideBy divide_by = DivideBy::kInitialWorldSize;
  // A rank that shadows this many steps is warned about once.
  int64_t skew_warning_steps = 1000;
  // Where warnings go; null: standard error.
  std::function<void(absl::string_view)> warn;
  // Called once on a rank when it has run dry while others have not, with the number of steps that it did.
  std::function<void(int64_t steps)> on_dry;
  // For the hooks of your own Joinables; RunJoined() does not look at it.
  std::map<std::string, std::string> hook_args;
};

// What a joined rank does in place of the loop.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  // This rank's loop has ended and it is about to follow the others; an error ends the group.
  virtual absl::Status OnDry() { return absl::OkStatus(); }
  // Once in each step in which the lowest active rank called this Joinable's Notify(), in the order of those calls:
  // issue what active ranks issue. `step` tells who is active.
  virtual absl::Status MainHook(const StepAnswer& /*step*/) { return absl::OkStatus(); }
  // The lowest active rank announced `payload` in this step (StepControl::Announce): do the same.
  virtual absl::Status OnAction(const StepAnswer& /*step*/, absl::string_view /*payload*/) { return absl::OkStatus(); }
  // Once when all ranks have run dry, on all of them. `is_last_joiner`: this rank was active to the end.
  virtual absl::Status PostHook(bool /*is_last_joiner*/) { return absl::OkStatus(); }
};

// Where in a step it acts. A step ends when somebody of an earlier phase begins the next one.
enum class JoinPhase { kGradients, kDefault, kOptimizer };

// How a Joinable takes part at the moment; the default outside of RunJoined(), to which it goes back.
struct JoinConfig {
  bool enable = false;
  int min_active_ranks = 1;
  // This Joinable's own; of all ranks alike.
  std::shared_ptr<StepDivisor> divisor = std::make_shared<StepDivisor>();
  bool is_first = false;                            // First of the list.
  bool has_optimizer = false;                       // The list has a Joinable of phase kOptimizer.
  const void* scope = nullptr;                      // The RunJoined() that it is in.
  std::function<absl::Status()> before_step;        // What that does before each step of this rank; null: nothing.
  std::optional<StepAnswer>* stopped_at = nullptr;  // There: in which step this rank was told that all ranks stop.
};

// How a Joinable comes into another group.
struct GroupChange {
  // The rank in the new group whose plan counts, and whose state comes with TakeOver(); -1: no state comes, and the
  // newest plan counts.
  int source = -1;
  // StepControl::steps_begun() of the old group when this rank's optimizers last finished a step: what was begun after
  // that is not finished. -1: nobody knows; a step is finished then when its gradients are.
  int64_t last_update = -1;
  // Optimizer steps that this rank has finished and the source has not; -1: it is in the middle of one.
  int64_t ahead = 0;
  // Inside of RunJoined(), between two steps: nothing is forgotten, gradients stay.
  bool between_steps = false;
};

// From one rank, whose state is right, to all: Recover().
struct StateTransfer {
  int source = 0;              // Rank in the group.
  int64_t steps = 0;           // Optimizer steps that it has finished.
  std::set<const void*> done;  // Parameter sets that are equal on all ranks already.
};

class Joinable {
 public:
  // `kind` names it in messages: "data_parallel" becomes "data_parallel#0", equal on all ranks.
  Joinable(Communicator* comm, absl::string_view kind);
  virtual ~Joinable();
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  virtual absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) = 0;
  virtual JoinPhase join_phase() const { return JoinPhase::kDefault; }
  // True for an optimizer that calls CountStep() in each of its steps. If gradients are reduced in RunJoined(), it must
  // step.
  virtual bool counts_steps() const { return false; }

  // Goes on in another group: keeps memory, plan and name, forgets a step that was running, and makes gradients none.
  // For a group that has ended, however it ended, also in the middle of backward; or for a sound one between two steps.
  // If a step was running in a sound group, that group ends. The old group may have been destroyed already.
  // Order:  a collective of the new group: on all of its ranks, for the same Joinables in the same order.
  // Errors: FailedPrecondition on all ranks, and nothing has changed: inside RunJoined(), another order, or a name that
  //         the new group has already. Any other error ends the new group; this object is in it then.
  absl::Status ReplaceGroup(Communicator* comm) { return ReplaceGroup(comm, GroupChange()); }
  // Whether a rank may leave and come back during RunJoined(): ReplaceGroup() and TakeOver() are all that it takes to
  // make this object equal to another rank's.
  virtual bool can_leave() const { return false; }
  // Where hooks that issue collectives of their own keep their tensors.
  virtual Device join_device() const { return comm_->device(); }

  Communicator& communicator() const { return *comm_; }
  const std::string& join_name() const { return name_; }
  const JoinConfig& join_config() const { return config_; }
  // Optimizer steps that this rank has finished, those of a rank that ran dry included; -1 for what is no optimizer.
  int64_t steps_finished() const { return join_phase() == JoinPhase::kOptimizer ? steps_finished_ : -1; }
  // After loading a checkpoint, and for one that is new in a group: from where it counts. On all ranks alike.
  void SetStepsFinished(int64_t steps) { steps_finished_ = steps; }

 protected:
  // For ReplaceGroup(). The first lets go of the old group (null if it has been destroyed) and must not wait; in the
  // second communicator() is the new one, and all ranks run it together: it may communicate. CheckGroup() says before
  // both whether that group will do.
  virtual absl::Status CheckGroup(const Communicator& /*comm*/) const { return absl::OkStatus(); }
  virtual void LeaveGroup(Communicator* /*old*/, const GroupChange& /*change*/) {}
  virtual absl::Status EnterGroup(const GroupChange& /*change*/) { return absl::OkStatus(); }
  // For Recover(), after ReplaceGroup(): takes the source's state. All ranks run it together.
  virtual absl::Status TakeOver(StateTransfer& /*transfer*/) { return absl::OkStatus(); }
  // Why this rank's state is not that of steps_finished(), if so: it was in the middle of a step. Aborted: it will do
  // where no rank has a better one.
  virtual absl::Status CheckWhole() const { return absl::OkStatus(); }

  // The group that it is in; null if that has been destroyed.
  Communicator* living_group() const { return group_.expired() ? nullptr : comm_; }
  // For optimizers, at the end of each step, and for what reduces gradients: all ranks' counts and `settings` are
  // compared before they go on (comm/step_ledger.h).
  void CountStep(absl::string_view settings = "") {
    ++steps_finished_;
    ++counted_;
    last_update_ = comm_->steps().steps_begun();
    comm_->steps().ledger().Finish(name_, steps_finished_, settings);
  }
  // Settings of the step that is about to begin, where it updates before all gradients are reduced.
  void DeclareSettings(absl::string_view settings) { comm_->steps().ledger().Plan(name_, settings); }

  // Call it first in each destructor that does more than free memory. If an exception destroys the object, it reports
  // that to the other ranks before the group's connections break.
  void ReportUnwinding();

  // Call before this object's first collective of a step. Tells the other ranks that this one is active (the first
  // caller of a step does; the others share its ticket) and returns at once, except where ranks may stop early: then it
  // waits for all ranks' records and answers OutOfRange if too few are active.
  absl::StatusOr<std::shared_ptr<StepTicket>> Notify();

 private:
  friend class JoinGroups;
  friend class JoinRun;
  friend class RecoveryRun;

  absl::Status ReplaceGroup(Communicator* comm, const GroupChange& change);

  Communicator* comm_;
  std::weak_ptr<const void> group_;  // Expires with the group.
  // The same group, where it is one of RunJoined()'s: so that this object stays usable if that ends with an error.
  std::shared_ptr<Communicator> loops_group_;
  const std::string name_;
  JoinConfig config_;
  int64_t steps_finished_ = 0;
  int64_t counted_ = 0;  // Calls of CountStep().
  const int exceptions_at_creation_ = std::uncaught_exceptions();
  // Another rank's state is missing here: Recover() began to write it and has not ended, or this rank has left a loop.
  bool is_taking_over_ = false;
  int64_t last_update_ = 0;  // In which of the group's steps, counted from 1, the last of them was.
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_JOINABLE_H_
