// The base class of the parts of training that exhausted ranks keep running inside RunJoined().
//
//   class Counter : public Joinable {          // counts the ranks with inputs
//    public:
//     Counter(Communicator* comm, Channel* channel)  // channel: of comm->OpenChannel("counter")
//         : Joinable(comm, "counter"), channel_(channel) {}
//     absl::StatusOr<float> Count() {          // called in each step of the loop
//       EK_RETURN_IF_ERROR(Notify().status());
//       return Sum(1);
//     }
//     absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
//       return std::make_unique<Hook>(this);
//     }
//
//    private:
//     struct Hook : JoinHook {                 // exhausted ranks issue the same all-reduce
//       explicit Hook(Counter* owner) : counter(owner) {}
//       absl::Status MainHook(const StepAnswer&) override { return counter->Sum(0).status(); }
//       Counter* const counter;
//     };
//     absl::StatusOr<float> Sum(float value) {
//       EK_RETURN_IF_ERROR(
//           channel_->AllReduce(absl::MakeSpan(&value, 1), ReduceOp::kSum).Wait());
//       return value;
//     }
//     Channel* const channel_;
//   };
//
// ReplaceGroup() moves a Joinable to another group, also after its group has ended; Recover() of
// recovery.h also makes the ranks' state equal. Override LeaveGroup() and EnterGroup() to open
// channels of the new group.
//
// Ownership: the communicator must outlive the Joinable's use; a Joinable must outlive the
//            RunJoined() to which it is passed.
// Threads:   thread-compatible.
// Source:    the generic Join of PyTorch (#61555), with one control record per step instead of its
//            small all-reduces.

#ifndef EVENKEEL_JOIN_JOINABLE_H_
#define EVENKEEL_JOIN_JOINABLE_H_

#include <cstdint>
#include <exception>
#include <functional>
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
#include "evenkeel/comm/control/control.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

struct JoinOptions {
  // False: inputs are known to be even. There are no records and no checks, and gradients are
  // divided by the full world size.
  bool enable = true;
  // All ranks stop at the first step for which one of them has no input: RunJoined() returns
  // OutOfRange on every rank, and all end as after the whole loop.
  bool throw_on_early_termination = false;
  // All ranks stop in the same way in the first step in which fewer ranks than this have inputs. 1:
  // no early stop; the group's size: the same as throw_on_early_termination.
  int min_active_ranks = 1;
  // The divisor of the sum of the ranks' gradients.
  DivideBy divide_by = DivideBy::kInitialWorldSize;
  // A rank that shadows this many steps is warned about once.
  int64_t skew_warning_steps = 1000;
  // Receives warnings; null: they go to stderr.
  std::function<void(absl::string_view)> warn;
  // Called once on a rank that is exhausted while others are not, with the number of its steps.
  std::function<void(int64_t steps)> on_exhausted;
  // For the hooks of your own Joinables; RunJoined() does not use it.
  std::map<std::string, std::string> hook_args;
};

// The actions of an exhausted rank in place of the loop.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  // Called when this rank's loop has ended, before it shadows the others; an error ends the group.
  virtual absl::Status OnExhausted() { return absl::OkStatus(); }
  // Called once in each step in which the lowest active rank called this Joinable's Notify(), in
  // the order of those calls. Must issue what active ranks issue. `step` has the active ranks.
  virtual absl::Status MainHook(const StepAnswer& /*step*/) { return absl::OkStatus(); }
  // Called when the lowest active rank has announced `payload` in this step
  // (StepControl::Announce).
  virtual absl::Status OnAction(const StepAnswer& /*step*/, absl::string_view /*payload*/) {
    return absl::OkStatus();
  }
  // Called once on all ranks when all are exhausted, or stop early. `is_last_joiner`: this rank was
  // active to the end.
  virtual absl::Status PostHook(bool /*is_last_joiner*/) { return absl::OkStatus(); }
};

// The part of a step in which a Joinable acts. A step ends when a Joinable of an earlier phase
// begins the next one.
enum class JoinPhase { kGradients, kDefault, kOptimizer };

// The settings of the RunJoined() in which a Joinable takes part; outside of one the defaults.
struct JoinConfig {
  bool enable = false;
  int min_active_ranks = 1;
  StepDivisor divisor;
  bool is_first = false;       // First of the list.
  bool has_optimizer = false;  // The list has a Joinable of phase kOptimizer.
  bool in_loop = false;        // It takes part in a running RunJoined().
  // Notify() writes the answer of the step in which all ranks stop early to this place.
  std::optional<StepAnswer>* stopped_at = nullptr;
};

// The circumstances in which a Joinable enters another group.
struct GroupChange {
  // The rank in the new group from which all ranks take the plan, and from which TakeOver()
  // receives state. -1: no state is received, and the newest plan is used.
  int source = -1;
  // StepControl::steps_begun() of the old group when this rank's optimizers last finished a step:
  // later steps are unfinished. -1: unknown; then a step is finished when its gradients are.
  int64_t last_update = -1;
  // The optimizer steps that this rank has finished beyond those of the source; -1: it is in the
  // middle of one.
  int64_t ahead = 0;
  bool has_newcomers = false;  // Some ranks of the new group have no state (Enter()).
};

// A transfer of state from one rank to all, in Recover().
struct StateTransfer {
  int source = 0;              // Rank in the group, whose state is right.
  int64_t steps = 0;           // The optimizer steps that the source has finished.
  std::vector<int> holders;    // The ranks that have the source's state themselves; none if it is
                               // not whole.
  std::set<const void*> done;  // Parameter sets that are equal on all ranks already.
  // The damage that was found and repaired, one sentence each; equal on all ranks.
  std::vector<std::string> repaired;
  bool is_torn = false;  // This rank had the state, and what it received instead is damaged.
};

// Gives a Joinable the state back that it had; null: that cannot be done.
using Restore = std::function<absl::Status()>;

class Joinable {
 public:
  // `kind` names it in messages: "data_parallel" becomes "data_parallel#0", equal on all ranks.
  Joinable(Communicator* comm, absl::string_view kind);
  virtual ~Joinable();
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  virtual absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) = 0;
  virtual JoinPhase join_phase() const { return JoinPhase::kDefault; }
  // Returns the ParameterSet that this object reduces, or updates; null: none. Such an optimizer
  // calls CountStep() in each of its steps, and must step in a RunJoined() that reduces gradients
  // of that set.
  virtual const void* trained_set() const { return nullptr; }

  // Moves this object to another group: keeps memory, plan and name, drops a running step, and
  // makes the gradients' state kNone. For a group that has ended, also in the middle of backward,
  // or for a working one between two steps; a working group with a running step ends. The old group
  // may have been destroyed already.
  //
  // Order:  a collective of the new group, for the same Joinables in the same order on all ranks.
  // Errors: FailedPrecondition on all ranks, without a change: inside RunJoined(), a different
  //         order, or a name that the new group has already. Any other error ends the new group, in
  //         which this object then is.
  absl::Status ReplaceGroup(Communicator* comm) { return ReplaceGroup(comm, GroupChange()); }

  Communicator& communicator() const { return *comm_; }
  const std::string& join_name() const { return name_; }
  const JoinConfig& join_config() const { return config_; }
  // Returns the optimizer steps that this rank has finished, shadowed ones included; -1 if this
  // object is not an optimizer.
  int64_t steps_finished() const {
    return join_phase() == JoinPhase::kOptimizer ? steps_finished_ : -1;
  }
  // Sets the count, after loading a checkpoint or for an object that is new in a group. Equal on
  // all ranks.
  void SetStepsFinished(int64_t steps) { steps_finished_ = steps; }

 protected:
  // For ReplaceGroup(). LeaveGroup() releases the old group (null if it has been destroyed) and
  // must not wait. In EnterGroup(), a collective that may communicate, communicator() is the new
  // one. CheckGroup() returns, before both, an error for a group that does not fit.
  virtual absl::Status CheckGroup(const Communicator& /*comm*/) const { return absl::OkStatus(); }
  virtual void LeaveGroup(Communicator* /*old*/, const GroupChange& /*change*/) {}
  virtual absl::Status EnterGroup(const GroupChange& /*change*/) { return absl::OkStatus(); }
  // For Recover(), after ReplaceGroup(): receives the source's state. A collective.
  virtual absl::Status TakeOver(StateTransfer& /*transfer*/) { return absl::OkStatus(); }
  // For Recover(), before ReplaceGroup(), on a rank that has a whole state and will receive that of
  // another step: keeps its own, in case the ranks that have the other one are lost meanwhile.
  // `kept`: the sets of parameters whose values another Joinable keeps.
  virtual absl::StatusOr<Restore> KeepState(std::set<const void*>& /*kept*/) {
    return [] { return absl::OkStatus(); };
  }
  // For Recover(): returns whether this rank's state is that of steps_finished().
  virtual HeldState CheckState() const { return {}; }

  // Returns its group; null if the group has been destroyed.
  Communicator* living_group() const { return group_.expired() ? nullptr : comm_; }
  // For optimizers, at the end of each step, and for reducers: the counts and `settings` of all
  // ranks are compared before the next step (join/steps/step_ledger.h).
  void CountStep(absl::string_view settings = "") {
    ++steps_finished_;
    ++counted_;
    StepControl& steps = StepControl::Of(*comm_);
    last_update_ = steps.steps_begun();
    steps.ledger().Finish(name_, steps_finished_, settings);
  }
  // Records the settings of the step that is about to begin, for updates before all gradients are
  // reduced.
  void DeclareSettings(absl::string_view settings) {
    StepControl::Of(*comm_).ledger().Plan(name_, settings);
  }

  // Returns the messages of all ranks on `topic` of this object, by rank. A collective.
  absl::StatusOr<ControlChannel::Parts> Exchange(absl::string_view topic, std::string mine) const;

  // To be called first in each destructor that does more than free memory. If an exception destroys
  // the object, it reports this to the other ranks, unless an Abort() with the reason follows.
  void ReportUnwinding();

  // To be called before this object's first collective of a step. Reports to the other ranks that
  // this one is active (the first caller of a step does; the others share its ticket) and returns
  // at once, unless ranks may stop early: then it waits for the records of all ranks and returns
  // OutOfRange if too few are active.
  absl::StatusOr<std::shared_ptr<StepTicket>> Notify();

 private:
  friend class JoinRun;
  friend class RecoveryRun;

  absl::Status ReplaceGroup(Communicator* comm, const GroupChange& change);

  Communicator* comm_;
  std::weak_ptr<const void> group_;  // Expires with the group.
  const std::string name_;
  JoinConfig config_;
  int64_t steps_finished_ = 0;
  int64_t counted_ = 0;  // Calls of CountStep().
  const int exceptions_at_creation_ = std::uncaught_exceptions();
  // The state of another rank is incomplete here: Recover() has not finished writing it.
  bool is_taking_over_ = false;
  int64_t last_update_ = 0;  // The group's step, counted from 1, of the last call.
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_JOINABLE_H_
