// An optimizer whose state is split over the ranks: each parameter has one owner, which alone keeps its moments,
// updates it and sends out the result. Same weights and state as Optimizer, bit for bit where sums have a fixed order.
//
//   EK_ASSIGN_OR_RETURN(auto optimizer, ShardedOptimizer::Create(&comm, &params, AdamW{.learning_rate = 3e-4}));
//   for (...) {
//     params.ClearGradients();
//     ... forward and backward set gradients ...
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//   EK_ASSIGN_OR_RETURN(OptimizerState all, optimizer->Consolidate());     // on all ranks together
//
// Gradients that a DataParallel reduced are used as they are. Those that are still this rank's own are averaged by
// Step() itself, towards their owner only, and used up: their state is none afterwards. Ranks may lack different ones.
// What a rank had accumulated when it ran dry goes into the next step of the others.
//
// Trainability: what was never trained has no owner and no state. A parameter that is frozen keeps both and is neither
//               updated nor sent, nor does it count when others get an owner. One that is trained for the first time
//               gets an owner and fresh state. A change counts from the next step on.
// Balance:      when what is trained has changed so much that one rank has most of the work, state moves to other
//               owners in the next step, on all ranks, dry ones too (max_imbalance); or when Rebalance() is called.
// Devices:      parameters of float32 or bfloat16 on the group's device (optimizer.h). A step is work on the parameters'
//               stream and the channel's; the host waits for none, whoever reduces the gradients, whether it clips or
//               skips or not. What reads or moves state waits, a step too in which it moves to other owners.
// Join:         in RunJoined(), ranks that ran dry go on as owners, with the settings of the lowest active rank. A
//               DataParallel that is used in the loop must be in the list too.
// Groups:       ReplaceGroup() and Recover() (join/recovery.h) go on in another group: the state is dealt out anew.
//               What a lost rank owned is lost: lost_shard says what happens then. So it is when a rank was in the
//               middle of an update, or a step ahead: a shard can't be taken back.
// Ownership:    the communicator outlives its use, the parameters outlive it. Create it on all ranks in the
//               same order.
// Threads:      thread-compatible. It waits in Step() for what it sent and received there; on a device the stream does.
// Errors:       InvalidArgument for settings or a state that do not fit, or ranks that differ (all ranks get that one).
//               FailedPrecondition for a gradient without memory, or ranks that train different parameters.
// Source:       Rajbhandari et al., "ZeRO", SC 2020, stage 1; whole tensors as PyTorch's ZeroRedundancyOptimizer.

#ifndef EVENKEEL_ZERO_OPTIM_SHARDED_OPTIMIZER_H_
#define EVENKEEL_ZERO_OPTIM_SHARDED_OPTIMIZER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/bucket/trainable_mask.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/device_agreement.h"
#include "evenkeel/zero_optim/internal/gradient_reduction.h"
#include "evenkeel/zero_optim/internal/last_checks.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/shard_move.h"
#include "evenkeel/zero_optim/internal/shard_plan.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/partition.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

struct ShardedOptimizerOptions {
  Bytes bucket_cap = kDefaultCap;  // Of what travels together: updated parameters, and gradients that Step() reduces.
  LostShard lost_shard = LostShard::kRefuse;
  std::string checkpoint_hint;  // For the message of kRefuse: what to resume from. SetCheckpointHint() changes it.
  // When the rank with the most trained elements has more than so many times the mean, and could have less, state moves
  // to other owners in the next step. Infinite: never. Owners that were dealt out by size are never improved, so
  // nothing moves until what is trained changes.
  double max_imbalance = 2.0;
};

class ShardedOptimizer : public Joinable, private StepParticipant {
 public:
  // All ranks together; by one rule for all parameters, or by groups (parameter_groups.h).
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(Communicator* comm, ParameterSet* params,
                                                                  const UpdateRule& rule,
                                                                  ShardedOptimizerOptions options = {});
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(Communicator* comm, ParameterSet* params,
                                                                  const std::vector<ParameterGroup>& groups,
                                                                  ShardedOptimizerOptions options = {});
  ~ShardedOptimizer() override;

  // All ranks that have inputs together, with equal options.
  absl::Status Step(const StepOptions& options = {});

  // What the gradients are, before Step() in the same step, on the ranks that call Step() together: reduces those that
  // Step() would reduce. What a step that was to clip, or to skip what is not finite, found tells last_check(); both
  // are equal on all ranks. On a device the norm may differ in the last bits between world sizes.
  absl::StatusOr<GradientCheck> CheckGradients(double norm = 2.0);
  const std::optional<GradientCheck>& last_check() const { return checks_.last(); }
  // The same of the step before the last; on a device it is there already, or almost (optimizer.h).
  const std::optional<GradientCheck>& check_before() const { return checks_.before(); }

  const ParameterGroups& groups() const { return updater_.groups(); }
  // Of all groups or of one, on all ranks alike; a dry rank gets it with the next step, or at the end of the loop.
  absl::Status SetLearningRate(double learning_rate) { return updater_.groups().SetLearningRate(learning_rate); }
  absl::Status SetLearningRate(absl::string_view group, double learning_rate) {
    return updater_.groups().SetLearningRate(group, learning_rate);
  }
  // One more, of parameters that were in none; those that are trained get owners, and nothing else moves. All ranks
  // together, between steps, not inside RunJoined().
  absl::Status AddGroup(ParameterGroup group);

  // kNoOwner: never trained, or in no group.
  int owner(int param) const { return plan()->owners.owner(param); }
  // The trained elements of the rank with the most, over the mean.
  double imbalance() const;
  // Deals out anew what the last step trained, if the rank with the most would have less then; its state moves. All
  // ranks together, between steps; inside RunJoined() after Step().
  absl::Status Rebalance();
  // Of what this rank owns.
  OptimizerState state() { return updater_.Export().value_or(OptimizerState()); }
  int64_t state_bytes() const { return updater_.state_bytes(); }

  // What an unsharded optimizer would hold: on the rank `to`, or on all; empty elsewhere. All ranks together; inside
  // RunJoined() only after Step(), and dry ranks that `to` names get nothing.
  absl::StatusOr<OptimizerState> Consolidate(int to = kAllRanks);
  // Replaces all state by what this rank owns of `state`, which is the whole of it and equal on all ranks. All ranks
  // together, between steps, not inside RunJoined().
  absl::Status LoadState(const OptimizerState& state);

  // The state, one parameter's tensor after the other and in chunks of at most `chunk` bytes (or one element), to
  // `sink` on the rank `to`, or on all: no rank holds more beside its own part than one chunk. An error of a sink ends
  // nothing: the rest is still sent, to nobody's use, and this rank gets the error. Same rules as for Consolidate().
  struct StateChunk {
    int param = 0;
    int64_t step = 0;          // Updates so far.
    absl::string_view tensor;  // Empty if the rule remembers nothing.
    int64_t count = 0;         // Elements of the whole tensor.
    int64_t begin = 0;         // Of `data` in it.
    TensorView data;           // On the CPU, until the sink returns.
  };
  using StateSink = absl::FunctionRef<absl::Status(const StateChunk& chunk)>;
  absl::Status ForEachState(int to, StateSink sink, Bytes chunk = Bytes{int64_t{64} << 20});

  // A checkpoint in a folder that all ranks see, each rank its own part (checkpoint.h), which an Optimizer can load as
  // well, at any world size. All ranks together, between steps; inside RunJoined() it can be saved after Step(), not
  // loaded.
  absl::Status Save(const std::string& folder);
  absl::Status Load(const std::string& folder);
  // What this rank writes of it, for WriteCheckpoint() in a hook that dry ranks run, too.
  absl::StatusOr<StatePieces> Pieces();

  // After each checkpoint that is not Save()'s: its path.
  void SetCheckpointHint(absl::string_view hint) { options_.checkpoint_hint = std::string(hint); }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  bool counts_steps() const override { return true; }

 private:
  using PlanPtr = std::shared_ptr<const internal::ShardPlan>;

  ShardedOptimizer(Communicator* comm, ParameterSet* params, ParameterGroups groups, ShardedOptimizerOptions options);
  absl::Status Init();

  const std::string& participant_name() const override { return join_name(); }
  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;
  std::string ExportState() const override;
  absl::Status ImportState(absl::string_view state) override;

  PlanPtr plan() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The plan for `mask`, with owners for those in `also_owned` and for what `mask` trains, where there is none.
  absl::Status AdoptMask(const TrainableMask& mask, const std::set<int>& also_owned = {});
  absl::Status SetPlan(OwnerTable owners, const TrainableMask& mask, uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);

  // The gradients of the step that runs: chosen, and maybe reduced already.
  struct Gradients {
    StepAnswer answer;
    std::shared_ptr<StepTicket> ticket;             // Null on a rank without inputs.
    std::vector<internal::GradientSource> chosen;   // As the lowest active rank sees them.
    std::vector<internal::GradientSource> sources;  // As far as they concern this rank.
    std::vector<int> to_reduce;
    double scale = 1.0;  // Of what is reduced.
    bool is_reduced = false;
  };
  absl::Status ChooseGradients();
  absl::Status TakeGradients(StepAnswer answer, std::vector<internal::GradientSource> chosen);
  absl::Status ReduceGradients();
  absl::StatusOr<TensorView> GradientOf(int param);
  // Those of `params` that this rank owns and that have one.
  absl::StatusOr<std::vector<internal::ParameterUpdater::Gradient>> OwnGradients(const std::vector<int>& params);
  absl::StatusOr<GradientCheck> Measure(double norm, double grad_scale);
  absl::StatusOr<StepOptions> DecideHere(const StepOptions& options);
  absl::Status DecideThere(const StepOptions& options);  // On a device, which the host does not wait for.
  enum class Action : char {
    kStep = 's',
    kCheck = 'g',
    kConsolidate = 'c',
    kRebalance = 'b',
    kSave = 'v',
    kStream = 't'
  };
  absl::Status Announce(Action action, const StepOptions& options);

  absl::Status OnAction(const StepAnswer& answer, absl::string_view payload);
  absl::Status RepeatStep(const StepAnswer& answer, Action action, absl::string_view message);
  absl::Status Run(const StepOptions& options);
  absl::Status UpdateAndSend(double grad_scale);
  absl::Status UpdateBucket(int index, const internal::ShardBucket& bucket, double grad_scale);

  // Joinable.
  void LeaveGroup(Communicator* old, const GroupChange& change) override;
  absl::Status EnterGroup(const GroupChange& change) override;
  absl::Status TakeOver(StateTransfer& transfer) override;
  absl::Status CheckWhole() const override;
  absl::Status TakeChannel();
  OwnerTable NobodyOwns() const;
  internal::ShardFacts Facts() const;
  absl::Status MoveState(const internal::ShardMove& move);
  std::vector<std::vector<int>> ParamsByGroup() const;
  absl::Status MoveTo(const OwnerTable& owners);
  absl::Status RebalanceHere();
  // Inside RunJoined(), where dry ranks must do it too: refused unless Step() was called in this step.
  absl::Status AnnounceAfterStep(absl::string_view call, const std::string& payload);

  absl::StatusOr<std::vector<int64_t>> GatherSteps();
  absl::StatusOr<OptimizerState> GatherThere(int to);  // From devices.
  absl::StatusOr<OptimizerState> Gather(int to);
  absl::Status CheckReceiver(absl::string_view call, int to) const;
  absl::Status Stream(int to, StateSink sink, Bytes chunk);
  absl::Status SaveHere(const std::string& folder);
  // The owners, and what was updated, of a state with these parameters.
  absl::Status OwnLoaded(const std::map<int, int64_t>& steps);

  ParameterSet* const params_;
  ShardedOptimizerOptions options_;
  const std::vector<ParamSpec> specs_;
  const std::vector<int> all_params_;
  internal::DeviceFlags flags_;  // Of the parameters that a step on devices reduces.
  internal::ParameterUpdater updater_;
  internal::LastChecks checks_;  // Behind the updater, whose device it asks.
  Channel* channel_ = nullptr;
  std::unique_ptr<internal::GradientReduction> reduction_;
  bool is_registered_ = false;
  uint64_t seen_mask_version_ = 0;         // Of the mask that the plan was made for.
  std::shared_ptr<StepTicket> last_step_;  // Step() ran in it.
  std::optional<Gradients> gradients_;
  std::vector<uint8_t> was_updated_;  // By parameter: a step for it; on a device its owner may have skipped them all.
  int held_rank_ = 0;                 // In the group that the plan's owners are ranks of.
  bool is_torn_ = false;              // An update began and did not end; on a device: was not put there as a whole.
  internal::OpenWorks open_;          // On a device: what the end of updates depends on.

  mutable absl::Mutex mutex_;  // The control thread reads the plan, too.
  PlanPtr plan_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_SHARDED_OPTIMIZER_H_
