// The placement Slices: each rank keeps and updates an equal slice of every gradient bucket. The
// comment at the top of slices.cc explains how a step runs.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICES_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/placement/owner_link.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"
#include "evenkeel/zero_optim/internal/placement/slice_layout.h"
#include "evenkeel/zero_optim/internal/placement/slice_move.h"
#include "evenkeel/zero_optim/internal/placement/slice_plan.h"
#include "evenkeel/zero_optim/internal/placement/slice_recovery.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel::internal {

// The phases of a step:
//
//   kReduced    Step() uses the slices of the last reduction; at first there are none.
//   kBegun      A step that reduces has begun, and no bucket is being reduced yet.
//   kReducing   Buckets are being reduced, and none is updated yet.
//   kUpdating   update_in_backward: buckets are being reduced, and some are updated.
//   kUpdated    update_in_backward: all buckets are reduced and updated; Step() must follow.
//   kStepped    Step() has run. A further one uses the same slices, unless they were used up in
//               backward.
//
//   from                          to         by
//   kReduced, kStepped            kBegun     OnStepBegin()
//   kBegun, kReducing             kBegun     OnStepBegin(), if the step before was dropped
//   kBegun                        kReducing  BeginReduction() of a step's first bucket
//   kReducing, kUpdating          kUpdating  OnReduced(), with update_in_backward
//   kBegun, kReducing             kReduced   OnStepEnd(); the former if all buckets were skipped
//   kUpdating                     kUpdated   OnStepEnd()
//   kReduced, kUpdated, kStepped  kStepped   Run(), which ends Step() and RepeatStep()
//   any                           kReduced   OnLeave()
//
// A step of a reducer in another group moves nothing; its first bucket returns the error. From
// OnStepBegin(), on the thread that begins the step, to OnStepEnd() no step of the optimizer may
// run: each method checks the phase before it moves on, and returns FailedPrecondition, because a
// program or another rank may call in any order.
//
// `is_torn_` is not a phase: an update is torn from its first bucket until the slices of all ranks
// have arrived and Step() has run. So kUpdating and kUpdated are torn, unless a state was loaded
// since. Other phases may be torn: kReduced while Step() updates, or where the group failed before
// the end, kStepped with overlap_forward, and on a device kReducing, too. Whether the reduction is
// taken does not depend on steps.
//
// While a step reduces, `updater_` belongs to the reducer's thread. It is used with `mutex_` held
// there, and wherever a step may run.
class SlicesOptimizer : public PlacedOptimizer {
 public:
  SlicesOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                  OptimizerOptions options);
  ~SlicesOptimizer() override;

  absl::Status Step(const StepOptions& options) override;
  absl::StatusOr<std::unique_ptr<BucketReduction>> TakeReduction(ReductionOptions options) override;
  absl::Status WaitFor(int param) override;
  absl::Status WaitForAll() override;
  const ParameterGroups& groups() const override { return groups_; }
  int64_t state_bytes() const override;
  OptimizerState state() override;
  absl::StatusOr<StatePieces> Pieces() override;

 private:
  class Reduction;
  enum class Phase { kReduced, kBegun, kReducing, kUpdating, kUpdated, kStepped };

  // The only writer of `phase_`. Its callers have checked that the move is legal.
  void MoveTo(Phase next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_reducing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return phase_ == Phase::kReducing || phase_ == Phase::kUpdating;
  }
  bool is_open() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return phase_ == Phase::kBegun || is_reducing();
  }
  // Returns whether buckets were updated in backward and Step() has not run since.
  bool awaits_step() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return phase_ == Phase::kUpdating || phase_ == Phase::kUpdated;
  }

  // StepParticipant. The ranks agree on the plan with the reducer's state; this one omits it.
  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;

  // The reduction (slices_reduction.cc).
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets);
  absl::StatusOr<RoundBuffers> BeginReduction(const BucketInfo& bucket, const ReductionStep& step);
  absl::Status OnReduced(int bucket, StreamRef stream);
  absl::Status OnStepBegin();
  void OnStepEnd();
  std::string SettingsMessage() const;
  absl::Status OnSettings(absl::string_view message);
  // Returns OK if a bucket may be reduced: in a step, by a reducer in this optimizer's group.
  absl::Status CheckReduction() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Copies the slices for a further Step(), because the reducer's buckets are freed.
  absl::Status KeepSlices() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Moves the state to the ranks that the newest plan names.
  absl::Status AdoptPlan() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetSlices() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendFlags(const BucketInfo& bucket, bool contributes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // A step.
  absl::Status CheckStepped() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSliced() const;
  // Find changes of the memory of gradients between the reduction, which leaves nothing there that
  // is used, and Step(): the program must not make any.
  void NoteGradients();
  absl::Status CheckMemory();
  // Returns by parameter: kHere if Step() uses the slices of its gradient, kNone if the program has
  // cleared or frozen it since the reduction.
  absl::StatusOr<std::vector<GradientSource>> ChooseSlices() const;
  absl::Status Run(const StepMessage& step, bool has_inputs);
  absl::Status RunBefore();
  bool IsUsed(const SlicePlan::Bucket& bucket, size_t position) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For Step(), after updates in backward. Returns true on a device, where it is not known.
  bool WasUpdated(int param) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status UpdateAll(const StepOptions& options);
  absl::Status UpdateAllThere(const StepOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // On a device.
  // Returns the gradients of a reduced bucket, on a device.
  std::vector<ParameterUpdater::Gradient> GradientsOf(int index) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayBeUnset() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // A gradient, for all that this rank knows.
  absl::Status UpdateInBackwardThere(int index, StreamRef stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Updates a bucket. `to_prepare` is empty if the preparation was done for all buckets together.
  absl::Status ApplyThere(int index, const std::optional<StepOptions>& to_prepare, StreamRef stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendOut(int index, StreamRef after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a device only the stream waits for the gathers: ends the update when they have succeeded.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Marks a torn update as whole if no part of it is missing.
  void EndTornUpdate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitUntilSettled();
  absl::StatusOr<GradientCheck> Measure(double norm, double grad_scale);
  absl::Status WaitForGathers();
  absl::Status WaitForFlagsAndState();  // On the CPU.
  void UpdateBucket(int bucket, double grad_scale) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // PlacedOptimizer; the state is in slices_state.cc.
  ParameterGroups& settings() override { return groups_; }
  absl::Status OnChannel() override;
  std::vector<Fact> OtherSettings() const override;
  absl::Status OnExhausted() override { return WaitForAll(); }
  absl::Status RepeatStep(const StepAnswer& answer, const StepMessage& step) override;
  absl::Status TakeGroups(ParameterGroups groups) override;
  absl::Status WaitForState() override;
  Holders HoldersOf(int param) const override;
  Ranges RangesToLoad() const override;
  absl::Status TakeState(const OptimizerState& state, const std::map<int, int64_t>& steps,
                         const Ranges& ranges, OptimizerState* movable) override;
  // Returns the ranks that are to have the state of each parameter: those of the newest plan; for
  // parameters in no bucket that have a state, all ranks in equal parts.
  std::vector<Holders> HoldersFor(absl::FunctionRef<bool(int param)> has_state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int64_t> Sizes() const;
  // Drops all of this rank's part that `holders` does not assign to it.
  absl::Status KeepOnly(int param, const Holders& holders) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Joinable (slices_group.cc).
  void OnLeave(Communicator* old) override;
  absl::Status OnEnter(const GroupChange& change) override;
  absl::Status TakeOverState(Channel& channel, StateTransfer& transfer) override;
  HeldState CheckState() const override;
  SliceFacts Facts() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Slices how_;
  ParameterGroups groups_;  // As the user has set them; those of the updater are in force.
  Channel* flag_channel_ =
      nullptr;  // Its operations interleave differently on each rank with the others.
  bool reduction_is_taken_ = false;
  int held_rank_ = 0, held_world_size_ = 1;  // In the group to which `holders_` refers.
  struct Note {
    int param = 0;
    void* data = nullptr;
    uint64_t hash = 0;
  };
  std::vector<Note> notes_;  // The gradients' memory as reduced, until Step().
  const std::shared_ptr<OwnerLink<SlicesOptimizer>> link_ =
      std::make_shared<OwnerLink<SlicesOptimizer>>(this, join_name());

  // The reducer's thread uses all of this while a step reduces, other threads between steps.
  mutable absl::Mutex mutex_;
  std::vector<Holders> holders_ ABSL_GUARDED_BY(mutex_);  // By parameter: which rank has what.
  Communicator* reducers_group_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::weak_ptr<const void> reducers_group_lives_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const SlicePlan> plan_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const SlicePlan> next_plan_
      ABSL_GUARDED_BY(mutex_);                               // From the next reduction on.
  std::shared_ptr<StateMove> move_ ABSL_GUARDED_BY(mutex_);  // Until a step has ended on all ranks.
  std::vector<float> flags_
      ABSL_GUARDED_BY(mutex_);  // Which parameters of the buckets have a gradient on some rank.
  std::vector<Work> flag_works_ ABSL_GUARDED_BY(mutex_);  // By bucket.
  std::vector<bool> reduced_
      ABSL_GUARDED_BY(mutex_);  // By bucket: its slice is the last reduction's.
  std::vector<GradientSource> sources_
      ABSL_GUARDED_BY(mutex_);  // By parameter, of the step that runs; empty: all are used.
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kReduced;
  std::vector<Work> gathers_ ABSL_GUARDED_BY(mutex_);  // By bucket; empty when all have ended.
  OpenWorks settling_ ABSL_GUARDED_BY(mutex_);         // Gathers on a device, see Settle().
  bool is_torn_ ABSL_GUARDED_BY(mutex_) = false;       // An update has begun and not ended.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICES_H_
