// Reduces gradients over the ranks while backward still runs: the engine under DataParallel.
//
//   EK_ASSIGN_OR_RETURN(auto reducer, Reducer::Create(&comm, &params, "my_reducer", {}));
//   EK_ASSIGN_OR_RETURN(auto ticket, comm.steps().Enter(...));       // who takes part in this step
//   EK_RETURN_IF_ERROR(reducer->BeginStep(ticket, StepMode::kSync, divisor));
//   ... backward: EK_RETURN_IF_ERROR(reducer->GradientReady(i)) as each gradient becomes final ...
//   EK_RETURN_IF_ERROR(reducer->FinishStep());                       // every gradient is the group's average
//
// A step:  BeginStep -> GradientReady for each trained parameter, in any order -> FinishStep. Buckets go out in index
//          order, asynchronously, as soon as all their gradients are there and all ranks have said that they reduce.
// Plans:   the first has one bucket per (dtype, device); the first synchronising step records the order in which
//          gradients arrive, and all ranks adopt the one of the lowest rank that was active in it when the next step
//          begins. A change of what is trained makes a new plan, and records again. Each plan is a new generation.
//          A plan is a value: plan_state().Serialize() can be kept, and given to ImportPlan() by another run, which
//          then needs neither the first plan nor tuning.
// Modes:   copy (gradients are copied into buckets and back), or gradients as bucket views (no copy; `grad` of each
//          trained parameter points into its bucket, stable within a generation). Zeroing gradients and setting them
//          to none are both safe in both.
//
// Devices: in a group on a device everything follows ParameterSet::stream(), which must be set, and is put there without
//          waiting for it. A bucket's gradients are copied in one launch when the last of them is announced (until then
//          they must stay as they are), its collective begins after that, and FinishStep() answers when all is on its
//          way, the averages included: what comes on the stream then sees them. The host waits for the device only
//          where it must: in a step in which this rank lacks a gradient (it has to learn whether another one has it),
//          for a new plan, and at the end. What fails on the device is answered later, at the latest by the next
//          BeginStep() that comes after it. Sparse parameters, tuning and Fusion::kMeasured are Unimplemented.
// Graphs:  within a generation buckets stay where they are, and with views gradients too; copies neither allocate nor
//          wait while gradients stay where they are. So forward, backward and an optimizer's update can be captured
//          into CUDA graphs, anew when generation() has changed, and replayed on the stream: BeginStep(), replay,
//          announce all, FinishStep(). The step itself stays outside: ranks agree on it on the host.
//
// Sparse:  rows are gathered from all ranks behind the buckets, when the step is finished, whatever the reduction.
// A set of parameters has one reducer at a time: destroy it before another is made for the same set, in whatever group.
// Groups: ReplaceGroup() goes on in another group, also after an error in the middle of backward.
//
// Ownership: the communicator outlives the reducer's steps, the parameters the reducer. Destruction gives gradients
//            their own memory back; inside a step it ends the group, whose operations use the buckets.
// Threads:   thread-compatible: one thread runs steps.
// Errors:    FailedPrecondition names the parameters that got no gradient, or two, or were not expected; the group
//            ends, because other ranks can't finish the step. No gradient is ever silently left local.
// Source:    Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.

#ifndef EVENKEEL_BUCKET_REDUCER_H_
#define EVENKEEL_BUCKET_REDUCER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/internal/bucket_pipeline.h"
#include "evenkeel/bucket/internal/bucket_storage.h"
#include "evenkeel/bucket/internal/device_side.h"
#include "evenkeel/bucket/internal/firing_counts.h"
#include "evenkeel/bucket/internal/fusion_trial.h"
#include "evenkeel/bucket/internal/plan_tuner.h"
#include "evenkeel/bucket/internal/ready_tracker.h"
#include "evenkeel/bucket/internal/sparse_reduction.h"
#include "evenkeel/bucket/internal/unused_agreement.h"
#include "evenkeel/bucket/internal/worker_thread.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan_state.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/step_divisor.h"

namespace evenkeel {

enum class StepMode {
  kSync,        // This step's gradients, with all that was accumulated before, are reduced.
  kAccumulate,  // Gradients stay local and add up.
};

struct ReducerOptions {
  std::vector<Bytes> caps = {kDefaultFirstCap, kDefaultCap};
  CapOrder cap_order = CapOrder::kFromFirstReady;
  bool gradient_as_bucket_view = false;
  // How a bucket's gradients go out together: copied into one piece of memory, or from where they lie.
  Fusion fusion = Fusion::kFlat;
  // What backward has not announced when the step ends has no gradient on this rank; otherwise that is an error. Tell
  // earlier with MarkUnused(): buckets wait for all their gradients.
  bool find_unused = false;
  // Buckets that no rank has a gradient for stay. One small all-reduce per step tells, and buckets wait for every
  // rank's MarkUnused().
  bool skip_unused_buckets = false;
  // Names of parameters whose gradients travel last, one bucket per element type, and not before backward has announced
  // that of `delay_until`, which may be one of them: their reduction then does not get in the way of collectives of
  // your own that backward waits for (an all-to-all). Both or neither; equal on all ranks. While `delay_until` is
  // frozen, they are just the last.
  std::vector<std::string> delayed;
  std::string delay_until;
  // The graph is the same in every step, so a gradient may be announced several times: after each use of the
  // parameter, after each of several forwards. The first step counts, and reduces at its end; a later one that differs
  // is an error.
  bool static_graph = false;
  // Chooses other caps once the gradient order is known: some steps are measured, and all ranks agree on what would
  // leave the least communication after backward. The plan keeps them: one that is imported is not tuned again.
  bool tune = false;
  int tuning_steps = 5;       // So many are measured; with Fusion::kMeasured as many of each kind.
  int64_t stats_every = 100;  // After the first ten, so many steps are measured once (stats.h).
};

inline constexpr int kNewestPlan = -1;

class Reducer {
 public:
  // All ranks together: what one of them can't do is an error on all. `name` must be unique in the group and equal on
  // all ranks; `reduction` null means all-reduce.
  static absl::StatusOr<std::unique_ptr<Reducer>> Create(Communicator* comm, ParameterSet* params,
                                                         absl::string_view name, ReducerOptions options,
                                                         std::unique_ptr<BucketReduction> reduction = nullptr);
  // OK if Create() has nothing to say against these. Nothing trained is no error: that may change.
  static absl::Status Check(const Communicator& comm, const ParameterSet& params, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a step, on active ranks ---------------------------------------------------------------
  // Adopts the recorded order, if one waits to be adopted. Done before each step; public for those who want the buckets
  // earlier. All ranks together.
  absl::Status RebuildNow();
  // Makes a new plan if the set of trained parameters has changed. FailedPrecondition, and nothing is changed, if a
  // parameter that is frozen now holds a local gradient that would be lost.
  absl::Status RefreshTrainable();
  void PrepareStep() { reduction_->PrepareStep(); }

  // Goes on in another group: same memory, same name. Forgets a step that was running, which ends the old group if it
  // is sound, and makes all gradients none. The ranks take the newest of their plans, or that of rank `plan_from`; an
  // order that was recorded and not adopted is recorded again. All ranks of the new group together. On failure it is in
  // the new group, which has ended.
  // `keeps_gradients`: no step was running, and gradients stay as they are.
  absl::Status ReplaceGroup(Communicator* comm, int plan_from = kNewestPlan, bool keeps_gradients = false);
  // Whether it is equal on all ranks once their parameters and plans are: its reduction has no state of its own.
  bool can_leave() const;
  // OK if tensors lie where that group's do.
  absl::Status CheckGroup(const Communicator& comm) const;
  // On a device, operations beside the reducer's: the next BeginStep() also sees whether these have failed.
  void Confirm(std::vector<Work> works) {
    if (device_ != nullptr) device_->Keep(std::move(works));
  }
  // After the group's end, on a device: whether every finished step's averages have come to be.
  absl::Status CheckFinished() const { return device_ == nullptr ? absl::OkStatus() : device_->CheckEnded(); }

  // A step ---------------------------------------------------------------------------------------
  // `divisor`: what the sums are divided by; shown each step, also one that accumulates.
  absl::Status BeginStep(std::shared_ptr<StepTicket> ticket, StepMode mode, std::shared_ptr<StepDivisor> divisor);
  // The gradient is final: it was written, or added to, and its state set to kLocal.
  absl::Status GradientReady(int param);
  // This rank has none for this parameter in this step: it adds nothing, and gets the others' average all the same. If
  // no rank has one, the gradient is none.
  absl::Status NoGradient(int param);
  // The same of all that backward will not reach, before it begins: once in a step, of none if need be.
  absl::Status MarkUnused(absl::Span<const int> params);
  // OK if FinishStep() will have all that it needs from this rank. Says so at once, and changes nothing.
  absl::Status CheckComplete() const;
  absl::Status FinishStep();
  bool in_step() const { return ticket_ != nullptr; }
  // What ranks that follow this one must know of the reduction in the step that begins.
  std::string StepMessage() { return reduction_->StepMessage(); }

  // On a rank that ran dry: the same step, contributing nothing but what it had accumulated before. The first issues
  // all buckets, the second waits for them.
  // `message`: the StepMessage() of the lowest active rank.
  absl::Status BeginShadow(const StepAnswer& answer, StepDivisor& divisor, absl::string_view message);
  absl::Status FinishShadow();

  // Makes reduced gradients none: a rank that followed others has had no chance to clear what they left.
  void ForgetReduced();

  // What it runs ---------------------------------------------------------------------------------
  const BucketPlan& plan() const { return storage_->plan(); }
  const std::vector<BucketInfo>& buckets() const { return storage_->buckets(); }
  uint64_t generation() const { return state_.generation; }
  // The collectives of a synchronising step, in order.
  const Schedule& schedule() const { return schedule_; }
  const PlanState& plan_state() const { return state_; }
  // Takes over another rank's plan, its trained parameters included.
  absl::Status ImportPlan(const PlanState& state);
  const StepTimes& last_step() const { return times_; }
  // Put together when asked; may allocate.
  ReducerStats stats() const;
  // Grows whenever parameters may be updated next: by each reduction, those included in which this rank had no inputs,
  // and in another group.
  int64_t reductions() const { return reductions_; }
  // How many synchronising steps in a row have ended with the same parameters unused on this rank: where it is each of
  // them, static_graph would do.
  int64_t same_unused_steps() const { return same_unused_steps_; }

 private:
  Reducer(Communicator* comm, ParameterSet* params, absl::string_view name, ReducerOptions options,
          std::unique_ptr<BucketReduction> reduction);

  absl::Status Init();
  absl::Status CheckNoneAdded() const;
  // Makes buckets for `state` and moves gradients over; on failure everything is as before.
  absl::Status Install(PlanState state);
  absl::Status AttachViews();
  absl::Status MoveGradient(int param, TensorView to);
  // What the reduction issues for the plan, and on which channels.
  absl::Status PlanCollectives();
  // The same, if the reduction has come to need others.
  absl::Status RefreshCollectives();
  // This rank's gradient, or that it has none, is in its bucket.
  void PutIn(int param);
  float* used_flags() { return static_cast<float*>(used_.data.get()); }
  // The same on a device, of a whole bucket; and what the bucket goes out with.
  TensorView separate_flags() const;
  absl::Status Pack(int bucket);
  absl::Status PutOnItsWay(int bucket);
  absl::Status Complete(double scale);
  void CompleteHere();
  absl::Status CompleteOnDevice();
  absl::Status SetUsed(absl::Span<const int> buckets);
  void ForgetStep();
  bool IsMeasured() const;
  Fusion FusionOf(const PlanState& state) const;
  // What is counted of a synchronising step that has ended well; `times` null: this rank shadowed it.
  absl::Status Account(const StepTimes* times);
  void RecordFor(const StepAnswer& answer);
  void DropRecordedOrder();
  absl::Status CheckCall(int param) const;
  absl::Status BeginCounting();
  // With static_graph, before the graph is known.
  bool IsCounting() const { return counts_.has_value() && !counts_->is_recorded(); }
  absl::Status Announce(int param);
  // Lets go what may leave now that `param` has been announced, which completed the bucket `complete` (-1: none).
  void Release(int param, int complete);
  absl::Status AnnounceTheRest();
  void AgreeOnUnused();
  void AgreeOnUnused(absl::Span<const uint8_t> uses, bool contributes);
  absl::Status WaitForUnused();
  absl::Status EndWith(const absl::Status& error);
  void LeaveGroup(bool keeps_gradients);
  absl::Status AgreeOnPlan(int plan_from);
  bool HasLivingGroup() const { return !group_.expired(); }

  Communicator* comm_;
  std::weak_ptr<const void> group_;  // Expires with the group.
  bool group_is_new_ = true;         // The reduction has seen no plan in it.
  ParameterSet* const params_;
  std::shared_ptr<const std::string> attached_;  // To the parameters.
  const std::string name_;
  const ReducerOptions options_;
  const bool has_own_reduction_;
  const std::unique_ptr<BucketReduction> reduction_;
  std::unique_ptr<DeviceSide> device_;  // Null on the CPU.
  std::vector<ParamSpec> specs_;

  PlanState state_;
  uint64_t seen_mask_version_ = 0;
  std::unique_ptr<BucketStorage> storage_;
  Memory used_;  // By parameter, whether it has a gradient; only where that is reduced separately.
  Schedule schedule_;
  std::shared_ptr<const BucketPipeline::Plan> pipeline_plan_;
  int64_t collectives_version_ = 0;  // Of the reduction, when that was made.
  SparseReduction sparse_;           // Of what is trained.
  ReadyTracker tracker_;
  int delay_until_ = -1;                     // Which parameter; -1: none.
  int delayed_bucket_ = -1;                  // The first that waits for it; those behind it do, too. -1: none does.
  std::optional<FiringCounts> counts_;       // With static_graph.
  std::unique_ptr<UnusedAgreement> unused_;  // With skip_unused_buckets.

  // Under which topic the order comes that is to be adopted: while state_.order_final is false, a synchronising step
  // records it and the next step adopts it. Empty: none is to come.
  std::string recorded_topic_;
  int recorder_ = -1;  // Whose order that will be.

  // The step that is running.
  std::shared_ptr<StepTicket> ticket_;
  StepMode mode_ = StepMode::kSync;
  std::shared_ptr<StepDivisor> divisor_;
  std::shared_ptr<BucketPipeline> pipeline_;
  std::vector<BucketPipeline::Ready> packed_;  // By bucket.
  StepAnswer shadow_answer_;                   // Of the step that is being shadowed.
  double shadow_scale_ = 1.0;
  absl::Status step_error_;
  StepTimes times_;
  int64_t reductions_ = 0;
  uint64_t unused_hash_ = 0;  // Of what was announced without a gradient.
  uint64_t last_unused_hash_ = 0;
  int64_t same_unused_steps_ = 0;

  StepAverages averages_;
  ReducerStats counted_;                       // Of it, only what is counted.
  std::unique_ptr<FusionTrial> fusion_trial_;  // With Fusion::kMeasured.
  std::unique_ptr<PlanTuner> tuner_;           // With tune.

  std::unique_ptr<WorkerThread> worker_;  // Of a reduction that has a thread. Last: it ends before what it uses.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_H_
