// Replicas of a model on every rank that train as one: equal parameters at the start, averaged gradients in each step,
// buffers that follow one rank.
//
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {}));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());                    // before forward
//     ... forward; in backward, as the gradient of parameter i becomes final in params[i].grad:
//         params.SetGradState(i, GradState::kLocal), then ddp->GradientReady(i) ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());                   // gradients are averages over the ranks now
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//
// Where ranks have different numbers of steps, run the loop in RunJoined({ddp.get(), optimizer.get()}, ...).
//
// Accumulation:  BeginStep(StepMode::kAccumulate) for all but the last backward of a batch. Its gradients stay local
//                and add up. What a rank had accumulated when it ran dry still goes into the next reduction.
// Trainability:  params.SetTrainable(...) between steps is seen by the next BeginStep(), on all ranks in the same step;
//                dry ranks follow. trainability.h has the policies, for flags that live in other tensors too.
// Evaluation:    between steps, any number of forwards on each rank: nothing communicates.
// Buffers:       before each step that follows a synchronising one, rank 0's buffers are broadcast; inside RunJoined()
//                those of the highest rank that has inputs. BufferOptions has other ways: the mean over the ranks that
//                have inputs, every so many steps, or SyncBuffers() only.
// Memory:        parameters and buffers may move between steps: ParameterSet::Rebind(), RebindBuffer(), or readers that
//                are asked in each step (DataParallelOptions::memory). Accumulated gradients move with them.
// What is left out: ParameterSet::Ignore() for parameters; buffers are left out of the list.
// Higher orders: values are reduced. The gradient of a gradient is your backward's business, before the announcement.
// Groups:        ReplaceGroup() and Recover() (join/recovery.h) go on in another group. A step that was not finished
//                leaves nothing behind: gradients are none, and buffers are as they were when it began.
// Devices:       as the reducer (reducer.h): everything follows ParameterSet::stream(), the buffers' broadcast too, and
//                a step waits for no device. FinishStep() still fails if a rank never issues its part. A later error of
//                the device may be reported only after an optimizer has used incomplete gradients (the end of a group
//                also ends what earlier steps have in flight); Recover() then treats this rank's state as inconsistent.
// Clear gradients between a reduction and the next backward: a reduced gradient that is not cleared is reduced again.
// Several in one step: all ranks compare whether they synchronise when the first of them begins the step; a difference
// in the others shows when ranks can't come together any more, which the control plane notices and names.
//
// Ownership: the communicator outlives its use; parameters and buffers outlive it, wherever they lie. Create it on all
//            ranks in the same order.
// Threads:   thread-compatible: one thread runs steps.
// Errors:    see Reducer. At creation, before anything is broadcast and on all ranks: InvalidArgument for what can't be
//            trained on one of them, or if the ranks' parameters, buffers or options differ; it names ranks, parameter
//            or option, and both values. A model without trained parameters is not an error: some may be unfrozen.
//            If an exception destroys it outside of RunJoined(), it reports to the other ranks which rank failed in
//            which step.

#ifndef EVENKEEL_BUCKET_DATA_PARALLEL_H_
#define EVENKEEL_BUCKET_DATA_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/internal/tensor_snapshot.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reducer.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/bucket/trainability.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

struct BufferOptions {
  BufferSync how = BufferSync::kBroadcast;
  // 1: buffers are made equal at the start of each step that follows a synchronising one; n: at every n-th of those
  // (the count begins again in another group); 0: by SyncBuffers() only, so that each rank keeps its own, also after an
  // uneven loop.
  int64_t every = 1;
};

// Return the current addresses of tensors that another library may move. BeginStep() calls the readers; exhausted ranks
// call them before each step that they follow. Null: the addresses in the ParameterSet and in the list of buffers.
struct MemoryReaders {
  std::function<TensorView(int param)> value;
  std::function<TensorView(int param)> gradient;  // Its own memory, not its bucket view; null data: unchanged.
  std::function<TensorView(int buffer)> buffer;
};

struct DataParallelOptions {
  ReducerOptions reducer;
  BufferOptions buffers;
  bool broadcast_initial_state = true;  // From rank 0: parameters, and buffers unless each rank has its own.
  TrainabilityOptions trainability;
  MemoryReaders memory;
};

class DataParallel : public Joinable, private StepParticipant {
 public:
  // All ranks together. `buffers` (running statistics) may be empty; `reduction` null means all-reduce.
  static absl::StatusOr<std::unique_ptr<DataParallel>> Create(Communicator* comm, ParameterSet* params,
                                                              std::vector<TensorView> buffers,
                                                              DataParallelOptions options = {},
                                                              std::unique_ptr<BucketReduction> reduction = nullptr);
  ~DataParallel() override;

  // Waits for the other ranks only if buffers are made equal, or where ranks may stop early.
  absl::Status BeginStep(StepMode mode = StepMode::kSync);
  // From backward, when gradient `param` is final: written, or added to what is there unless its state is kNone, and
  // its state set to kLocal.
  absl::Status GradientReady(int param) { return reducer_->GradientReady(param); }
  // Instead of it, where this rank has no gradient for a trained parameter: it adds nothing to the others'.
  absl::Status NoGradient(int param) { return reducer_->NoGradient(param); }
  // The same of all that backward will not reach, between BeginStep() and backward; see ReducerOptions::find_unused.
  absl::Status MarkUnused(absl::Span<const int> params) { return reducer_->MarkUnused(params); }
  // After backward: OK if FinishStep() will have all that it needs from this rank.
  absl::Status CheckComplete() const { return reducer_->CheckComplete(); }
  absl::Status FinishStep();

  // Takes a change of what is trained into account now, whatever the policy. All ranks together.
  absl::Status RefreshTrainable();
  // Under TrainabilityPolicy::kOnNotification: the next step looks at the reader's flags.
  void TrainableChanged() { trainability_.Notify(); }
  // True if the next BeginStep() makes buffers equal.
  bool WillSyncBuffers() const;
  // Makes the buffers equal now, between two steps, as BufferOptions::how says. A collective of all ranks. Inside
  // RunJoined() call it after the first step, on every rank that had inputs in the last one; exhausted ranks follow.
  absl::Status SyncBuffers();
  // Records that a buffer, with its contents, has moved to `to`; see ParameterSet::Rebind().
  absl::Status RebindBuffer(int buffer, TensorView to);
  // The state of an optimizer of your own that is not in RunJoined()'s list, to be made equal after an uneven loop;
  // empty for one without state. Without it the next RunJoined() refuses to start after an uneven one; named then, on
  // all ranks, the state is made equal when that starts.
  void SetOptimizerState(std::vector<TensorView> state);

  const Reducer& reducer() const { return *reducer_; }
  const std::vector<BucketInfo>& buckets() const { return reducer_->buckets(); }
  // Adopts the recorded gradient order now instead of with the next step. All ranks together.
  absl::Status RebuildNow();
  // The plan, to be kept for a later run of the same model, and taken over there: on all ranks the same, before a step.
  // What it trains is trained then. InvalidArgument, and nothing changed, for bytes that are no plan of such a model.
  std::string ExportPlan() const { return reducer_->plan_state().Serialize(); }
  absl::Status ImportPlan(absl::string_view plan);
  // All collectives of the next synchronising step: buffers, then buckets. Joined ranks run the same list.
  Schedule StepSchedule() const;

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }
  bool can_leave() const override { return reducer_->can_leave(); }

 private:
  class Hook;

  DataParallel(Communicator* comm, ParameterSet* params, std::vector<TensorView> buffers, DataParallelOptions options)
      : Joinable(comm, "data_parallel"),
        params_(params),
        buffers_(std::move(buffers)),
        options_(options),
        trainability_(options.trainability, params, join_name()) {}

  // StepParticipant.
  const std::string& participant_name() const override { return join_name(); }
  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;
  std::string ExportState() const override;
  absl::Status ImportState(absl::string_view state) override;

  // Whose buffers count in this step.
  StateSource BufferSource(const StepAnswer& answer) const;
  absl::Status BeginBufferSync(const StepAnswer& answer);
  // Adopts the current addresses. Called before any of that memory is read or written.
  absl::Status FollowMemory();
  // A step has begun, whether it made buffers equal or not.
  void NoteStepBegun(bool synchronises);
  absl::Status Shadow(const StepAnswer& answer, absl::string_view message);
  absl::Status EndJoin(bool is_last_joiner);
  absl::Status CheckReplicas();
  // What must be equal on all ranks.
  std::vector<Fact> Facts() const;
  void PublishPlan();

  // Joinable.
  absl::Status CheckGroup(const Communicator& comm) const override { return reducer_->CheckGroup(comm); }
  void LeaveGroup(Communicator* old, const GroupChange& change) override;
  absl::Status EnterGroup(const GroupChange& change) override;
  absl::Status TakeOver(StateTransfer& transfer) override;
  absl::Status CheckWhole() const override;
  absl::Status TakeOverBuffers(int source);
  absl::Status TakeOverAfterLoop(StateTransfer& transfer);
  absl::Status FindStaleRoot();
  // Before a step of this rank: what a repetition of it must begin with.
  absl::Status KeepBuffers(bool is_active);
  struct KeptBuffers;
  absl::Status RestoreBuffers(const KeptBuffers& kept);

  ParameterSet* const params_;
  std::vector<TensorView> buffers_;
  const DataParallelOptions options_;
  TrainabilityWatch trainability_;
  uint64_t checked_memory_ = 0;  // ParameterSet::memory_version() of the addresses that were found valid.
  std::unique_ptr<Reducer> reducer_;
  Channel* state_channel_ = nullptr;  // Buffers and initial state; gradients have the reducer's.

  StepMode mode_ = StepMode::kSync;
  bool last_step_synced_ = true;
  int64_t buffer_turn_ = 0;  // Steps that followed a synchronising one.

  // The buffers as they were before a step (from its first backward to the one that synchronises).
  struct KeptBuffers {
    TensorSnapshot content;
    int64_t step = 0;         // As the group counted it.
    bool was_active = true;   // This rank had inputs in it.
    bool was_joined = false;  // It was inside RunJoined().
  };
  DeviceRuntime* runtime_ = nullptr;  // Null on the CPU.
  KeptBuffers kept_;                  // Before the step that was begun last,
  KeptBuffers kept_before_;           // and before the one before it.
  bool step_is_open_ = false;         // The gradients of the former are still to come.
  bool is_back_in_loop_ = false;      // The group was replaced between two steps of a loop.
  bool buffers_are_right_ = true;     // On entering a group: they are those with which its first step begins.

  // Whether a rank had run dry in a step of this loop. Shared, because answers may come after this object's end.
  std::shared_ptr<std::atomic<bool>> saw_uneven_ = std::make_shared<std::atomic<bool>>(false);
  bool has_optimizer_state_ = false;
  std::vector<TensorView> optimizer_state_;
  bool shadowed_ = false;         // In this loop, this rank followed the others.
  std::string refusal_;           // Why the next RunJoined() can't start; empty if it can.
  int stale_root_ = -1;           // Who then has the right state of the optimizer; -1: nobody any more.
  bool has_stale_state_ = false;  // This rank's is not the right one.

  mutable absl::Mutex mutex_;
  std::string exported_ ABSL_GUARDED_BY(mutex_);  // The plan, for ranks that are behind.
  std::string note_;
  uint64_t mask_hash_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_DATA_PARALLEL_H_
