// The common base of all placements of an Optimizer: settings, checks, calls that exhausted ranks
// repeat, and the state as a whole, in memory and in checkpoints.
//
// A placement determines how a step runs (Step(), RepeatStep()), which rank holds which range of
// the state (HoldersOf(), AddUpSteps()), which ranges it reads from a checkpoint (RangesToLoad())
// and how it takes over another state (TakeState()). The class has three sections: the calls of
// users, those of a placement to this class (protected), and the parts of a placement, which this
// class calls (private virtual functions). A placement uses four members: the parameters,
// `updater_`, `checks_` and `device_flags_`.
//
// Calls that a placement lacks return Unimplemented (Lacks()):
//
//                      Replicated  in backward  WholeTensors  Slices  in backward
//   BeforeUpdate()     x                        x             x
//   AfterUpdate()      x                        x             x       x
//   CheckGradients()   x           (1)          x
//   TakeReduction()                x                          (2)     (2)
//   Rebalance()                                 x
//
// (1) FailedPrecondition once it has its reduction. (2) Without options. WaitFor(), WaitForAll(),
// owner() and imbalance() have defaults for placements to which they do not apply.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_PLACED_OPTIMIZER_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_PLACED_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero_optim/internal/device_agreement.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/last_checks.h"
#include "evenkeel/zero_optim/internal/lost_state.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/placement/slice_layout.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel::internal {

// The facts that all ranks' optimizers must have in common.
enum class SameIn {
  kEverything,
  kShape,  // The parameters, their groups and state tensors. Settings and trainability may change
           // while a step fails.
};

class PlacedOptimizer : public Optimizer, private StepParticipant {
 public:
  // Returns OK if the ranks agree and this object can be used. All ranks call it together, before
  // any other function. `own`: an error of this rank.
  absl::Status Start(absl::Status own);

  // Optimizer: the same with every placement.
  absl::Status BeforeUpdate(
      std::function<absl::Status(absl::Span<const GradientPiece>)> function) final;
  absl::Status AfterUpdate(std::function<absl::Status()> function) final;
  const std::optional<GradientCheck>& last_check() const final { return checks_.last(); }
  const std::optional<GradientCheck>& check_before() const final { return checks_.before(); }
  absl::Status AddGroup(ParameterGroup group) final;
  const Placement& placement() const final { return options_.placement; }
  absl::StatusOr<OptimizerState> Consolidate(int to) final;
  absl::Status VisitState(int to, StateSink sink, Bytes chunk) final;
  absl::Status LoadState(const OptimizerState& state) final;
  absl::Status Save(const std::string& folder) final;
  absl::StatusOr<PendingSave> SaveAsync(const std::string& folder) final;
  absl::Status Load(const std::string& folder) final;
  void SetCheckpointHint(absl::string_view hint) final {
    options_.checkpoint_hint = std::string(hint);
  }

  // Optimizer: calls that only some placements have. The others use these.
  absl::StatusOr<GradientCheck> CheckGradients(double /*norm*/) override {
    return Lacks("CheckGradients()");
  }
  absl::StatusOr<std::unique_ptr<BucketReduction>> TakeReduction(ReductionOptions) override {
    return Lacks("TakeReduction()");
  }
  absl::Status Rebalance() override { return Lacks("Rebalance()"); }
  int owner(int /*param*/) const override { return kNoOwner; }
  double imbalance() const override { return 1; }
  absl::Status WaitFor(int param) override { return CheckParam(param); }
  absl::Status WaitForAll() override { return absl::OkStatus(); }

  // Optimizer: calls that some placements do in another way.
  const ParameterGroups& groups() const override { return updater_.groups(); }
  OptimizerState state() override { return updater_.Export().value_or(OptimizerState()); }
  int64_t state_bytes() const override { return updater_.state_bytes(); }

  // Joinable.
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) final;
  const void* trained_set() const final { return params_; }

 protected:
  PlacedOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                  OptimizerOptions options);

  // Calls of a placement to this class ------------------------------------------------------------

  // Returns Unimplemented: this placement has no `what`.
  absl::Status Lacks(absl::string_view what) const;
  // Returns FailedPrecondition, with a message that begins with this optimizer's name.
  template <typename... Parts>
  absl::Status Refusal(const Parts&... parts) const {
    return absl::FailedPreconditionError(absl::StrCat(join_name(), parts...));
  }
  absl::Status CheckParam(int param) const;
  const OptimizerOptions& options() const { return options_; }
  bool updates_in_backward() const {
    const auto* const replicated = std::get_if<Replicated>(&options_.placement);
    const auto* const slices = std::get_if<Slices>(&options_.placement);
    return (replicated != nullptr && replicated->update_in_backward) ||
           (slices != nullptr && slices->update_in_backward);
  }
  StateRange WholeOf(int param) const { return {0, (*params_)[param].value.count}; }
  Channel* channel() const { return channel_; }  // For split state; null before OnChannel().
  // Called first in the destructors of placements. Returns the group, or null if it is gone.
  Communicator* Detach();
  // Compares the optimizers of all ranks, when they are made or enter another group: their
  // placement, `facts`, and the parameters with as much as `same` names. All ranks get the same
  // result, as from VerifySame().
  absl::Status CheckSame(const absl::Status& own, std::vector<Fact> facts = {},
                         SameIn same = SameIn::kShape) const;
  Standing StandingOf(bool is_torn) const {  // Without `holds_state`.
    return {.steps_finished = steps_finished(),
            .is_torn = is_torn,
            .may_lose = options_.lost_shard == LostShard::kFresh,
            .checkpoint_hint = options_.checkpoint_hint};
  }
  // Takes over the settings of the parameter groups of rank `source`. A collective.
  absl::Status AdoptSettingsOf(int source);

  // In the order of a step:
  //
  // ChooseSources(), where `local` is the role of unreduced gradients if there are other ranks.
  absl::StatusOr<std::vector<GradientSource>> Choose(const TrainableMask& mask,
                                                     LocalGradients local) const;
  // Called at the beginning of Step(), which runs in the step of this ticket.
  void NoteStep(std::shared_ptr<StepTicket> ticket) { last_step_ = std::move(ticket); }
  absl::Status Announce(const OptimizerAction& action);
  // Announces a call that exhausted ranks must repeat inside RunJoined(). Refuses it unless Step()
  // was called in this step.
  absl::Status AnnounceAfterStep(absl::string_view call, const OptimizerAction& action);
  // Compares the values before the first update, unless a reducer has made them equal. A collective
  // of all ranks, exhausted ones included.
  absl::Status CheckFirstValues();
  // The loop of an active rank may have changed values, or gradients that are to be used, and
  // exhausted ranks do not run that code. So in steps with exhausted ranks active ranks send hashes
  // of their tensors (StepMessage::hashes), and exhausted ranks compare them with those of their
  // own; CheckUnchanged() returns an error that names the first tensor that differs.
  std::vector<uint64_t> HashTensors(absl::Span<const GradientSource> sources) const;
  absl::Status CheckUnchanged(const StepMessage& step) const;
  // The same for values alone, on all ranks: for updates before an optimizer's step.
  absl::Status CheckValuesUnchanged() const;
  bool has_functions_before() const { return !before_update_.empty(); }
  // Returns the pieces of whole parameters whose gradients are reduced already.
  std::vector<GradientPiece> WholePieces(absl::Span<const GradientSource> sources) const;
  absl::Status RunBeforeUpdate(absl::Span<const GradientPiece> pieces);
  // Combines this rank's measurement of its part, on the CPU, with those of the group.
  absl::StatusOr<GradientCheck> Total(GradientMeasure measure, double norm, double grad_scale);
  // On a device, for the gradients of the updater's list kStepList: measures those of all ranks, if
  // the step must know them; then counts the step and decides whether it is skipped. `flags` and
  // `may_be_unset`: as of ParameterUpdater::PrepareThere().
  absl::Status MeasureStepThere(const StepOptions& options);
  absl::Status PrepareStepThere(const StepOptions& options, const TensorView& flags = {},
                                bool may_be_unset = false);
  bool has_functions_after() const { return !after_update_.empty(); }
  // The end of a step, when all values are there. `step.sources` may be empty.
  absl::Status EndUpdate(const StepMessage& step);

  // Returns the number of updates of each parameter. A collective.
  absl::StatusOr<std::vector<int64_t>> CountSteps();

  using Ranges = ParameterUpdater::Ranges;
  // Lists of gradients in a device's tables: those of a step, then a list for each bucket.
  static constexpr int kStepList = 0, kFirstBucketList = 1;

  ParameterSet* const params_;
  DeviceFlags device_flags_;  // Before the updater, which waits for the work that reads them.
  // Its groups are the settings in force.
  ParameterUpdater updater_;
  LastChecks checks_;  // After the updater, whose device it uses.

 private:
  // The parts of a placement, which this class calls ----------------------------------------------
  //
  // They are in addition to Step(), Pieces() and CheckState(), which have no default.

  // The placement's part of Start().
  virtual absl::Status Init() { return absl::OkStatus(); }
  virtual std::vector<Fact> OtherSettings() const = 0;
  // Called before Init(), and before OnEnter(), if the state is split and channel() is new.
  virtual absl::Status OnChannel() { return absl::OkStatus(); }
  ParameterGroups& settings() override { return updater_.groups(); }
  // Takes over settings() with one group more, which all ranks have added.
  virtual absl::Status TakeGroups(ParameterGroups groups) {
    updater_.groups() = std::move(groups);
    return absl::OkStatus();
  }

  // Called when a loop begins.
  virtual void OnLoopBegin() {}
  // Called on an exhausted rank: when it becomes one, and for each call that the lowest active rank
  // has announced.
  virtual absl::Status OnExhausted() { return absl::OkStatus(); }
  virtual absl::Status RepeatStep(const StepAnswer& answer, const StepMessage& step) = 0;
  virtual absl::Status RepeatCheck(const StepAnswer& /*answer*/, const StepMessage& /*step*/) {
    return UnknownAction();
  }
  virtual absl::Status RebalanceNow() { return UnknownAction(); }

  // StepParticipant, if the state is split.
  absl::StatusOr<ParticipantState> PrepareStep() override { return CurrentState(); }
  ParticipantState CurrentState() const override { return {}; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view /*state*/) override { return absl::OkStatus(); }

  // Waits until no step changes the state any more.
  virtual absl::Status WaitForState() { return absl::OkStatus(); }
  // Returns the holders of an updated parameter's state; rank kAllRanks: each has all of it.
  virtual Holders HoldersOf(int param) const = 0;
  // Makes this rank's counts of updates, by parameter, those of all ranks.
  virtual absl::Status AddUpSteps(std::vector<int64_t>& /*steps*/) { return absl::OkStatus(); }
  // The ranges of a checkpoint to read.
  virtual Ranges RangesToLoad() const { return WholeRanges(); }
  // Takes over this rank's part of a state, which has these ranges. `steps`: of all parameters.
  // `movable`: as of ParameterUpdater::Import().
  virtual absl::Status TakeState(const OptimizerState& state, const std::map<int, int64_t>& steps,
                                 const Ranges& ranges, OptimizerState* movable) = 0;

  // The placement's parts of LeaveGroup() and EnterGroup().
  virtual void OnLeave(Communicator* /*old*/) {}
  virtual absl::Status OnEnter(const GroupChange& change) = 0;
  // Takes over the state of rank `source`, whose parameters this rank has already. `channel`: this
  // optimizer's.
  virtual absl::Status TakeOverState(Channel& /*channel*/, StateTransfer& transfer) {
    return AdoptSettingsOf(transfer.source);
  }

  // This class's own ------------------------------------------------------------------------------

  const std::string& participant_name() const final { return join_name(); }
  absl::Status TakeChannel();
  void Register();
  void Unregister(Communicator* comm);
  void LeaveGroup(Communicator* old, const GroupChange& change) final;
  absl::Status EnterGroup(const GroupChange& change) final;
  absl::Status TakeOver(StateTransfer& transfer) final;
  absl::StatusOr<Restore> KeepState(std::set<const void*>& kept) final;
  absl::Status Repeat(const StepAnswer& answer, const StepMessage& step);
  absl::Status Repeat(const StepAnswer& answer, const CheckAction& check);
  absl::Status Repeat(const StepAnswer& answer, const RebalanceAction& rebalance);
  absl::Status Repeat(const StepAnswer& answer, const SaveAction& save);
  absl::Status Repeat(const StepAnswer& answer, const VisitAction& visit);
  absl::Status UnknownAction() const;
  absl::Status CheckReceiver(absl::string_view call, int to) const;
  absl::Status Visit(absl::string_view call, int to, StateSink sink, Bytes chunk);
  absl::Status Stream(int to, StateSink sink, Bytes chunk);
  CheckpointToWrite ToSave(const std::string& folder);
  absl::Status SaveNow(const std::string& folder);
  PendingSave StartSave(const std::string& folder);
  // Waits for the last SaveAsync().
  void FinishSave(absl::Duration timeout);

  bool is_split() const { return !std::holds_alternative<Replicated>(options_.placement); }
  Ranges WholeRanges() const;
  bool ComparesFirstValues() const;
  std::vector<int> ExhaustedRanks() const;
  absl::StatusOr<std::optional<Divergence>> CompareValues() const;
  absl::string_view placement_name() const;
  absl::Status CheckSameGroups(const absl::Status& own, const ParameterGroups& groups,
                               std::vector<Fact> facts, SameIn same) const;
  // Takes the settings with which the ranks that were active to the end of a joined loop end it:
  // others may have missed a change after the last step. A collective; FailedPrecondition on all if
  // those ranks differ, with both values. Returns whether all ranks were active to the end.
  absl::StatusOr<bool> AdoptFromLastJoiners(bool is_last_joiner);
  absl::Status EndLoop(bool is_last_joiner);
  // Returns the first names of the parameters without a gradient in a step, for the comparison of
  // the ranks. Empty if the parameters are those of the step before.
  std::string MissingText(absl::Span<const GradientSource> sources);
  absl::Status ChangedError(absl::string_view tensor, absl::string_view function) const;

  OptimizerOptions options_;
  Channel* channel_ = nullptr;
  std::shared_ptr<StepTicket> last_step_;  // NoteStep()
  std::vector<std::function<absl::Status(absl::Span<const GradientPiece>)>> before_update_;
  std::vector<std::function<absl::Status()>> after_update_;
  bool is_registered_ = false;
  bool has_begun_ = false;  // A first update.
  uint64_t missing_ = 0;    // A hash of the parameters that MissingText() has found; 0: none.
  std::string saving_;  // The folder of the last SaveAsync(); empty: FinishSave() has seen its end.
  CheckpointWriter writer_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_PLACED_OPTIMIZER_H_
