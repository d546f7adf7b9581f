// An optimizer whose state is split into equal slices: each rank keeps, and updates, the same number of elements of
// every gradient bucket. Gradients are reduced to where they are needed only, half the traffic of an all-reduce;
// updated parameters come back the same way. Same weights and state as Optimizer, bit for bit where sums have a fixed
// order.
//
//   EK_ASSIGN_OR_RETURN(auto optimizer, SlicedOptimizer::Create(&comm, &params, AdamW{.learning_rate = 3e-4}));
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {}, optimizer->TakeReduction()));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ... forward, backward, which announces gradients to ddp ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());          // each rank has its slice of the gradients; `grad` is none
//     EK_RETURN_IF_ERROR(optimizer->Step());          // the parameters are updated, on all ranks
//   }
//   EK_ASSIGN_OR_RETURN(OptimizerState all, optimizer->Consolidate());     // on all ranks together
//
// A step, for each bucket in order: reduce-scatter (in backward), one pass over this rank's slice (gradient, moments,
// parameters), all-gather of the parameters, straight into their memory. Traffic per rank: (N - 1) / N of the
// gradients, and as much of the parameters; plus one float per parameter, which says whether any rank had a gradient of
// it: one that nobody has is left alone, decay and step count included.
//
// When:         SliceUpdates says whether buckets are updated in Step(), or as soon as they are reduced, in backward.
// Overlap:      with overlap_forward Step() does not wait for the other ranks' slices; see WaitFor().
// State:        count / N elements per rank, at most 16 per bucket more (slices are multiples of 16 elements). It
//               begins with a parameter's first update.
// Plans:        slices follow the buckets. When those change (the first step's gradient order, what is trained), the
//               state that changes hands moves in the next synchronising step. What is frozen keeps its state where it
//               is.
// Accumulation: the DataParallel's; a step without reduction needs no Step().
// Devices:      parameters of float32 or bfloat16 on the group's device (optimizer.h). A step is work on streams: the
//               reducer's, the parameters' and the channels'; the host waits for none, whatever gradients there are.
//               WaitFor() orders the parameters' stream. With SliceUpdates::kInBackward updates are put there by the
//               step's end, which the host reaches first, and run beside the rest of backward. What reads or moves state
//               waits, and so may the first step of a new plan.
// Join:         put both into RunJoined()'s list. Ranks that ran dry update their slices with the others' gradients, by
//               the settings of the lowest active rank.
// Groups:       ReplaceGroup() and Recover() (join/recovery.h) go on in another group, together with the DataParallel.
//               What a lost rank held is lost: lost_shard says what happens then. So it is when a rank was in the
//               middle of an update, or a step ahead: a slice can't be taken back.
// Ownership:    the communicator outlives its use, the parameters outlive it, it outlives the DataParallel's steps.
//               Create it on all ranks in the same order, before the DataParallel. That one trains parameters of this
//               optimizer's groups only.
// Threads:      thread-compatible. Buckets are updated on a thread of the reducer's with SliceUpdates::kInBackward.
// Errors:       InvalidArgument for settings or a state that do not fit, or ranks that differ (all ranks get that one).
//               FailedPrecondition from Step() for a gradient that did not come as a slice.
// Source:       Rajbhandari et al., "ZeRO", SC 2020, stage 1.

#ifndef EVENKEEL_ZERO_OPTIM_SLICED_OPTIMIZER_H_
#define EVENKEEL_ZERO_OPTIM_SLICED_OPTIMIZER_H_

#include <cstdint>
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
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/device_agreement.h"
#include "evenkeel/zero_optim/internal/last_checks.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/slice_layout.h"
#include "evenkeel/zero_optim/internal/slice_move.h"
#include "evenkeel/zero_optim/internal/slice_plan.h"
#include "evenkeel/zero_optim/internal/slice_recovery.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

// When a bucket is updated.
enum class SliceUpdates : uint8_t {
  // In Step(), which may say how (StepOptions). Until then nothing has changed, and a failed step can be repeated.
  kInStep,
  // As soon as it is reduced, while backward goes on with others, from the first step on. Settings are those that were
  // there when the step began (BeginStep()), Step() takes no options, and waits for what is under way. A gradient may
  // only be announced when backward does not need its parameter any more. A step that fails leaves a torn state.
  kInBackward,
};

struct SlicedOptimizerOptions {
  SliceUpdates updates = SliceUpdates::kInStep;
  // Step() returns before the other ranks' slices of the parameters have come: WaitFor() each before it is used.
  bool overlap_forward = false;
  LostShard lost_shard = LostShard::kRefuse;
  std::string checkpoint_hint;  // For the message of kRefuse: what to resume from. SetCheckpointHint() changes it.
};

class SlicedOptimizer : public Joinable, private StepParticipant {
 public:
  // All ranks together; by one rule for all parameters, or by groups (parameter_groups.h).
  static absl::StatusOr<std::unique_ptr<SlicedOptimizer>> Create(Communicator* comm, ParameterSet* params,
                                                                 const UpdateRule& rule,
                                                                 SlicedOptimizerOptions options = {});
  static absl::StatusOr<std::unique_ptr<SlicedOptimizer>> Create(Communicator* comm, ParameterSet* params,
                                                                 const std::vector<ParameterGroup>& groups,
                                                                 SlicedOptimizerOptions options = {});
  ~SlicedOptimizer() override;

  // For the one DataParallel (or Reducer) that reduces the gradients.
  std::unique_ptr<BucketReduction> TakeReduction();

  // All ranks that have inputs together, with equal options, after the reduction's FinishStep().
  absl::Status Step(const StepOptions& options = {});
  // What the last step found that was to clip, or to skip what is not finite; equal on all ranks. Unlike the other
  // optimizers' its norm may differ in the last bits between world sizes, which cut parameters differently.
  const std::optional<GradientCheck>& last_check() const { return checks_.last(); }
  // The same of the step before the last; on a device it is there already, or almost (optimizer.h).
  const std::optional<GradientCheck>& check_before() const { return checks_.before(); }

  // Until parameter `param` is updated (on a device: its stream waits); all of them. Needed with overlap_forward only:
  // before anybody reads it, or another object makes use of it. The next reduction, Consolidate() and the end of
  // RunJoined() wait by themselves.
  absl::Status WaitFor(int param);
  absl::Status WaitForAll();

  const ParameterGroups& groups() const { return groups_; }
  // Of all groups or of one, on all ranks alike; a dry rank gets it with the next step, or at the end of the loop.
  absl::Status SetLearningRate(double learning_rate) { return groups_.SetLearningRate(learning_rate); }
  absl::Status SetLearningRate(absl::string_view group, double learning_rate) {
    return groups_.SetLearningRate(group, learning_rate);
  }
  // One more, of parameters that were in none. All ranks together, between steps, not inside RunJoined().
  absl::Status AddGroup(ParameterGroup group);

  // Of what this rank keeps.
  int64_t state_bytes() const;

  // What an unsharded optimizer would hold: on the rank `to`, or on all; empty elsewhere. All ranks together; inside
  // RunJoined() only after Step(), and dry ranks that `to` names get nothing.
  absl::StatusOr<OptimizerState> Consolidate(int to = kAllRanks);
  // Replaces all state by this rank's part of `state`, which is the whole of it and equal on all ranks. All ranks
  // together, between steps, not inside RunJoined().
  absl::Status LoadState(const OptimizerState& state);

  // A checkpoint in a folder that all ranks see (checkpoint.h), which the other optimizers can load as well, and at any
  // world size. All ranks together, between steps; inside RunJoined() only Save(), after Step().
  absl::Status Save(const std::string& folder);
  absl::Status Load(const std::string& folder);
  // What this rank writes of it, for WriteCheckpoint() in a hook that dry ranks run, too. Waits for the step's end.
  absl::StatusOr<StatePieces> Pieces();

  // After each checkpoint that is not Save()'s: its path.
  void SetCheckpointHint(absl::string_view hint) { options_.checkpoint_hint = std::string(hint); }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  bool counts_steps() const override { return true; }

 private:
  class Reduction;
  class Hook;

  SlicedOptimizer(Communicator* comm, ParameterSet* params, ParameterGroups groups, SlicedOptimizerOptions options);
  static absl::StatusOr<std::unique_ptr<SlicedOptimizer>> Make(Communicator* comm, ParameterSet* params,
                                                               absl::StatusOr<ParameterGroups> groups,
                                                               SlicedOptimizerOptions options);
  absl::Status TakeChannels();
  bool is_on_device() const { return communicator().runtime() != nullptr; }
  bool updates_in_backward() const { return options_.updates == SliceUpdates::kInBackward; }

  // StepParticipant. What the ranks must agree on of the plan they agree on with the reducer's.
  const std::string& participant_name() const override { return join_name(); }
  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view /*state*/) override { return absl::OkStatus(); }

  // The reduction (sliced_optimizer_reduction.cc).
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets);
  absl::StatusOr<RoundBuffers> BeginReduction(const BucketInfo& bucket, const ReductionStep& step);
  absl::Status OnReduced(int bucket, StreamRef stream);
  void OnStepEnd();
  std::string SettingsMessage() const;
  absl::Status OnSettings(absl::string_view message);
  absl::Status CheckGroups() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The state moves to where the newest plan has it.
  absl::Status AdoptPlan() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendFlags(const BucketInfo& bucket, bool contributes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // A step.
  absl::Status CheckGradients() const;
  absl::Status RepeatStep(absl::string_view message);
  absl::Status Run(const internal::StepMessage& step, bool has_inputs);
  absl::Status UpdateAll(const StepOptions& options);
  absl::Status UpdateAllThere(const StepOptions& options) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // On a device.
  // On a device: of a bucket that was reduced.
  std::vector<internal::ParameterUpdater::Gradient> GradientsOf(int index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayBeUnset() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // A gradient, for all that this rank knows.
  absl::Status UpdateInBackwardThere(int index, StreamRef stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The update; `to_prepare`, unless that was done for all buckets together.
  absl::Status ApplyThere(int index, const std::optional<StepOptions>& to_prepare, StreamRef stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendOut(int index, StreamRef after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a device gathers that the stream waits for, and not the host: when they have ended well the update is over.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitUntilSettled();
  absl::StatusOr<GradientCheck> Measure(double norm, double grad_scale);
  absl::Status WaitForGathers();
  void UpdateBucket(int bucket, double grad_scale) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnAction(absl::string_view payload);

  // State (sliced_optimizer_state.cc).
  absl::StatusOr<OptimizerState> Gather(int to);
  absl::Status SaveHere(const std::string& folder);
  // Where the state of all parameters is to be: as the newest plan has it; of what is in no bucket, if there is some,
  // in equal parts.
  std::vector<internal::Holders> HoldersFor(absl::FunctionRef<bool(int param)> has_state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int64_t> Sizes() const;
  // This rank keeps of its part what `holders` say, and nothing else.
  absl::Status KeepOnly(int param, const internal::Holders& holders) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // First byte of what the lowest active rank announces.
  enum class Action : char { kStep = 's', kConsolidate = 'c', kSave = 'v' };
  // Joinable (sliced_optimizer_group.cc).
  absl::Status AnnounceAfterStep(absl::string_view call, const std::string& payload);
  void LeaveGroup(Communicator* old, const GroupChange& change) override;
  absl::Status EnterGroup(const GroupChange& change) override;
  absl::Status TakeOver(StateTransfer& transfer) override;
  absl::Status CheckWhole() const override;
  internal::SliceFacts Facts() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ParameterSet* const params_;
  SlicedOptimizerOptions options_;
  ParameterGroups groups_;  // As the user has set them; those of the updater are in force.
  Channel* channel_ = nullptr;
  Channel* flag_channel_ = nullptr;  // Its operations interleave differently on each rank with the others.
  bool is_registered_ = false;
  bool reduction_is_taken_ = false;
  int held_rank_ = 0, held_world_size_ = 1;  // In the group whose `holders_` it has.
  std::shared_ptr<StepTicket> last_step_;    // Step() ran in it.

  // The reducer's thread works with all of this while a step reduces, others between steps.
  mutable absl::Mutex mutex_;
  internal::DeviceFlags device_flags_ ABSL_GUARDED_BY(mutex_);
  internal::ParameterUpdater updater_ ABSL_GUARDED_BY(mutex_);
  internal::LastChecks checks_;                                     // Behind the updater, whose device it asks.
  std::vector<internal::Holders> holders_ ABSL_GUARDED_BY(mutex_);  // By parameter: whose state is where.
  const Communicator* reducers_group_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::shared_ptr<const internal::SlicePlan> plan_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const internal::SlicePlan> next_plan_ ABSL_GUARDED_BY(mutex_);  // From the next reduction on.
  std::shared_ptr<internal::StateMove> move_ ABSL_GUARDED_BY(mutex_);  // Until a step has ended on all ranks.
  std::vector<float> flags_ ABSL_GUARDED_BY(mutex_);  // Which parameters of the buckets have a gradient on some rank.
  std::vector<Work> flag_works_ ABSL_GUARDED_BY(mutex_);  // By bucket.
  std::vector<bool> reduced_ ABSL_GUARDED_BY(mutex_);     // By bucket: its gradient waits for its update.
  bool is_between_reductions_ ABSL_GUARDED_BY(mutex_) = true;
  std::vector<Work> gathers_ ABSL_GUARDED_BY(mutex_);        // By bucket; empty when all have ended.
  internal::OpenWorks settling_ ABSL_GUARDED_BY(mutex_);     // Gathers on a device, see Settle().
  bool gradients_are_lost_ ABSL_GUARDED_BY(mutex_) = false;  // The buckets went before Step().
  bool awaits_step_ ABSL_GUARDED_BY(mutex_) = false;         // Buckets were updated in backward.
  bool is_torn_ ABSL_GUARDED_BY(mutex_) = false;             // An update began and did not end.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_SLICED_OPTIMIZER_H_
