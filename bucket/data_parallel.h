// Trains replicas of a model, one per rank, as one model: equal parameters at the start, averaged
// gradients in each step, buffers that follow one rank.
//
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {}));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());                    // before forward
//     ... forward; in backward, as the gradient of parameter i becomes final in params[i].grad:
//         params.SetGradState(i, GradState::kLocal), then ddp->GradientReady(i) ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());  // gradients are averages over the ranks now
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//
// If the ranks have different numbers of steps, run the loop in RunJoined({ddp.get(),
// optimizer.get()}, ...).
//
// Accumulation:  BeginStep(StepMode::kAccumulate) for all but the last backward of a batch. Its
//                gradients stay local and add up. What a rank had accumulated when it became
//                exhausted still goes into the next reduction.
// Trainability:  params.SetTrainable(...) between steps takes effect in the next BeginStep(), on
//                all ranks in the same step, exhausted ranks included. trainability.h has the
//                policies, also for flags that other tensors keep.
// Evaluation:    between steps, any number of forwards on each rank, without communication.
// Buffers:       before each step that follows a synchronising one, rank 0's buffers are broadcast;
//                inside RunJoined() those of the highest rank that has inputs. RunJoined() ends
//                with equal buffers, also if it stops early: those of the highest rank that had
//                inputs to the end. BufferOptions has other ways: the mean over the ranks that have
//                inputs, every so many steps, at the end of a step, or SyncBuffers() only, which
//                the end of RunJoined() does not call.
// Memory:        parameters and buffers may move between steps: ParameterSet::Rebind(),
//                RebindBuffer(), or readers that each step calls (DataParallelOptions::memory).
//                Accumulated gradients move with them.
// Replicas:      DataParallelOptions::check_replicas compares them at regular steps
//                (replica_check.h).
// Exclusion:     ParameterSet::Ignore() excludes a parameter; leave an excluded buffer out of the
//                list.
// Higher orders: values are reduced. The gradient of a gradient must be complete before the
//                announcement.
// Groups:        ReplaceGroup() and Recover() (join/recovery.h) move it to another group. An
//                unfinished step has no effect: the gradients' state is kNone, and buffers are as
//                they were when the step began.
// Devices:       as the reducer (reducer.h): all work, the buffers' broadcast included, follows
//                ParameterSet::stream(), and a step waits for no device. FinishStep() still fails
//                if a rank never issues its part. A later error of the device may be reported only
//                after an optimizer has used incomplete gradients (the end of a group also ends
//                what earlier steps have in flight); Recover() then treats this rank's state as
//                inconsistent.
// Clear gradients between a reduction and the next backward: a reduced gradient that is not cleared
// is reduced again. RunJoined() ends with those that the ranks with inputs to the end have not
// cleared. With several DataParallel in one step, the ranks compare their modes when the
// first of them begins the step; the control plane reports a difference in the others as a
// deadlock.
//
// Ownership: the communicator must outlive its use; parameters and buffers must outlive it. Create
//            it on all ranks in the same order.
// Threads:   thread-compatible: one thread runs steps.
// Errors:    see Reducer. At creation, before anything is broadcast and on all ranks:
//            InvalidArgument if a rank cannot train its parameters, or if the ranks' parameters,
//            buffers or options differ, with the ranks, the parameter or option, and both values. A
//            model without trained parameters is allowed: some may be unfrozen later. If it is
//            destroyed inside a step, or by an exception outside of RunJoined(), the other ranks
//            receive the reason of the Communicator::Abort() that follows, or else an error that
//            names this rank.

#ifndef EVENKEEL_BUCKET_DATA_PARALLEL_H_
#define EVENKEEL_BUCKET_DATA_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reducer/reducer.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/replica_check.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/bucket/trainability.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/phase_clock.h"

namespace evenkeel {

enum class BufferTime : uint8_t {
  kStepStart,  // BeginStep(), with the values that forward then reads.
  // FinishStep(), with the same bytes: no rank has statistics of a finished step that are lost with
  // it, which replacing a rank needs (docs/replacement.md).
  kStepEnd,
};

struct BufferOptions {
  BufferSync how = BufferSync::kBroadcast;
  // 1: buffers are made equal at the start of each step that follows a synchronising one; n: at
  // every n-th of those (the count restarts in another group); 0: only by SyncBuffers(), so that
  // each rank keeps its own, also after an uneven loop. With kStepEnd: at the end of each
  // synchronising step, or of every n-th.
  int64_t every = 1;
  BufferTime when = BufferTime::kStepStart;
};

// Functions that return the current addresses of tensors that another library may move. BeginStep()
// calls them; exhausted ranks call them before each step that they shadow. Null: the addresses in
// the ParameterSet and in the list of buffers.
struct MemoryReaders {
  std::function<TensorView(int param)> value;
  std::function<TensorView(int param)>
      gradient;  // Its own memory, not its bucket view; null data: unchanged.
  std::function<TensorView(int buffer)> buffer;
};

struct DataParallelOptions {
  ReducerOptions reducer;
  BufferOptions buffers;
  bool broadcast_initial_state =
      true;  // From rank 0: parameters, and buffers unless each rank keeps its own.
  TrainabilityOptions trainability;
  MemoryReaders memory;
  // Called when a new plan has moved gradients to other memory: as a step begins, also one that
  // another object of the group begins.
  std::function<void()> on_plan;
  // Compares parameters, and buffers that a step makes equal, in BeginStep(), at regular steps.
  ReplicaCheckOptions check_replicas;
};

class DataParallel : public Joinable, public GradientReducer, private StepParticipant {
 public:
  // A collective. `buffers` (running statistics) may be empty; a null `reduction` means all-reduce.
  static absl::StatusOr<std::unique_ptr<DataParallel>> Create(
      Communicator* comm, ParameterSet* params, std::vector<TensorView> buffers,
      DataParallelOptions options = {}, std::unique_ptr<BucketReduction> reduction = nullptr);
  ~DataParallel() override;

  // Begins a step. Waits for the other ranks only if buffers are made equal, or ranks may stop
  // early.
  absl::Status BeginStep(StepMode mode = StepMode::kSync);
  // Announces, from backward, that gradient `param` is final: written, or added to the present
  // value unless its state was kNone, and its state set to kLocal.
  absl::Status GradientReady(int param) {
    if (phases_ != nullptr) phases_->BeginBackward();
    return reducer_->GradientReady(param);
  }
  // Announces that this rank has no gradient for a trained parameter, and adds nothing to those of
  // the other ranks.
  absl::Status NoGradient(int param) { return reducer_->NoGradient(param); }
  // Announces the same for all parameters that backward will not reach, between BeginStep() and
  // backward; see ReducerOptions::find_unused.
  absl::Status MarkUnused(absl::Span<const int> params) { return reducer_->MarkUnused(params); }
  // Returns, after backward, OK if FinishStep() has all that it needs from this rank.
  absl::Status CheckComplete() const { return reducer_->CheckComplete(); }
  absl::Status FinishStep();

  // Adopts a change of the set of trained parameters now, whatever the policy. A collective.
  absl::Status RefreshTrainable();
  // With TrainabilityPolicy::kOnNotification: makes the next step read the flags.
  void TrainableChanged() { trainability_.Notify(); }
  // Returns true if the next BeginStep() makes buffers equal.
  bool WillSyncBuffers() const;
  // Makes the buffers equal now, between two steps, by BufferOptions::how. A collective. Inside
  // RunJoined() call it after the first step, on every rank that had inputs in the last one;
  // exhausted ranks shadow it.
  absl::Status SyncBuffers();
  // Records that a buffer, with its contents, has moved to `to`; see ParameterSet::Rebind().
  absl::Status RebindBuffer(int buffer, TensorView to);
  // Names the state of your own optimizer that is not in RunJoined()'s list; it is made equal after
  // an uneven loop. Empty for an optimizer without state. RunJoined() refuses another one together
  // with an optimizer in its list. Without this call the next RunJoined()
  // refuses to start after an uneven one. After that error, call it on all ranks: the next
  // RunJoined() makes the state equal when it starts.
  void SetOptimizerState(std::vector<TensorView> state);

  // GradientReducer.
  Communicator& communicator() const override { return Joinable::communicator(); }
  ParameterSet& parameters() const override { return *params_; }
  absl::Status InstallReduction(std::unique_ptr<BucketReduction> reduction) override {
    return reducer_->InstallReduction(std::move(reduction));
  }

  const Reducer& reducer() const { return *reducer_; }
  const std::vector<BucketInfo>& buckets() const { return reducer_->buckets(); }
  // Returns the highest of the ranks that had inputs to the end of the last RunJoined(); -1 if all
  // had.
  int last_rank() const { return last_rank_; }
  // Adopts the recorded gradient order now instead of in the next step. A collective.
  absl::Status RebuildNow();
  // ExportPlan() returns the plan as bytes; ImportPlan() adopts it in a later run of the same
  // model: before a step, with equal bytes on all ranks. The plan's set of trained parameters is
  // adopted, too. InvalidArgument, without a change, for bytes that are not a plan of such a model.
  std::string ExportPlan() const { return reducer_->plan_state().Serialize(); }
  absl::Status ImportPlan(absl::string_view plan);
  // Returns all collectives of the next synchronising step: buffers, then buckets. Exhausted ranks
  // run the same list.
  Schedule StepSchedule() const;

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }
  const void* trained_set() const override { return params_; }

 private:
  struct Action;

  DataParallel(Communicator* comm, ParameterSet* params, std::vector<TensorView> buffers,
               DataParallelOptions options);

  // StepParticipant.
  const std::string& participant_name() const override { return join_name(); }
  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;
  std::string ExportState() const override;
  absl::Status ImportState(absl::string_view state) override;

  // The rank whose buffers count in this step.
  StateSource BufferSource(const StepAnswer& answer) const;
  absl::Status BeginBufferSync(const StepAnswer& answer);
  // Adopts the current addresses. Called before any of that memory is read or written.
  absl::Status FollowMemory();
  // For messages: why a step that another object began ended without this one.
  std::string OtherFlagsText() const;
  // Called when a step has begun, whether or not it made buffers equal.
  void NoteStepBegun(bool synchronises);
  absl::Status Shadow(const StepAnswer& answer, const Action& action);
  absl::Status EndJoin(bool is_last_joiner);
  absl::Status CheckReplicas();
  std::vector<NamedView> NamedBuffers() const;
  // Returns whether the next step, if it synchronises, ends with equal buffers.
  bool WillEndWithSync() const;
  // Returns whether each synchronising step begins and ends with the same buffers on all ranks.
  bool HasEqualBuffers() const;
  bool WillCompareReplicas() const;
  absl::Status CompareReplicas(bool has_equal_buffers);
  // Makes buffers equal, then compares replicas, each if it is due in the step that begins.
  absl::Status PrepareTensors(const StepAnswer& answer);
  // Returns this rank's samples in its gradients before a step.
  int64_t SamplesBeforeStep() const {
    return params_->has_local_gradients() ? accumulated_samples_ : 0;
  }
  // Records that a step of this rank has begun.
  void CountSamples(StepMode mode);
  // Returns the facts that must be equal on all ranks.
  std::vector<Fact> Facts() const;
  void PublishPlan();

  // Joinable.
  absl::Status CheckGroup(const Communicator& comm) const override {
    return Reducer::CheckGroup(comm, *params_);
  }
  void LeaveGroup(Communicator* old, const GroupChange& change) override;
  absl::Status EnterGroup(const GroupChange& change) override;
  absl::Status TakeOver(StateTransfer& transfer) override;
  absl::StatusOr<Restore> KeepState(std::set<const void*>& kept) override;
  HeldState CheckState() const override;
  absl::Status TakeOverBuffers(StateTransfer& transfer);
  absl::Status Transfer(StateTransfer& transfer, const std::vector<NamedView>& state);
  absl::Status FindStaleRoot();
  // Keeps, before a step of this rank, the state with which a repetition of it must begin.
  absl::Status KeepBuffers(bool is_active);
  struct KeptBuffers;
  absl::Status RestoreBuffers(const KeptBuffers& kept);

  ParameterSet* const params_;
  std::vector<TensorView> buffers_;
  const DataParallelOptions options_;
  TrainabilityWatch trainability_;
  uint64_t checked_memory_ =
      0;  // ParameterSet::memory_version() of the addresses that were found valid.
  std::unique_ptr<Reducer> reducer_;
  Channel* state_channel_ = nullptr;  // Buffers and initial state; gradients have the reducer's.

  StepMode mode_ = StepMode::kSync;
  PhaseClock* phases_ = nullptr;  // The group's, once a step has begun in it.
  bool last_step_synced_ = true;
  bool ends_with_sync_ = false;  // The step that was begun last makes buffers equal at its end.
  int64_t buffer_turn_ = 0;      // Steps that followed a synchronising one.

  DeviceRuntime* runtime_ = nullptr;  // Null on the CPU.
  // Before the step that was begun last, and before the one before it.
  std::unique_ptr<KeptBuffers> kept_, kept_before_;
  bool step_is_open_ = false;  // The gradients of the former are still to come.
  bool buffers_are_right_ =
      true;  // On entering a group: they are those with which its first step begins.

  // Whether a rank was exhausted in a step of this loop. Shared, because answers may come after
  // this object's end.
  std::shared_ptr<std::atomic<bool>> saw_uneven_ = std::make_shared<std::atomic<bool>>(false);
  bool has_optimizer_state_ = false;
  std::vector<TensorView> optimizer_state_;
  // In gradients that steps have accumulated and none has reduced: StepRecord::samples.
  int64_t accumulated_samples_ = 0;
  int last_rank_ = -1;
  std::string refusal_;  // The reason why the next RunJoined() cannot start; empty if it can.
  int stale_root_ = -1;  // The rank with the optimizer state that then counts; -1: none.
  bool has_stale_state_ = false;  // The optimizer state of this rank does not count.

  mutable absl::Mutex mutex_;
  std::string exported_ ABSL_GUARDED_BY(mutex_);  // The plan, for ranks that are behind.
  std::string note_;
  uint64_t mask_hash_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_DATA_PARALLEL_H_
