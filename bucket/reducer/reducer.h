// Reduces gradients over the ranks while backward runs: the engine of DataParallel.
//
//   EK_ASSIGN_OR_RETURN(auto reducer, Reducer::Create(&comm, &params, "my_reducer", {}));
//   EK_ASSIGN_OR_RETURN(auto ticket, StepControl::Of(comm).Enter(...));  // the ranks in this step
//   EK_RETURN_IF_ERROR(reducer->BeginStep(ticket, StepMode::kSync, divisor));
//   ... backward: EK_RETURN_IF_ERROR(reducer->GradientReady(i)) as each gradient becomes final ...
//   EK_RETURN_IF_ERROR(reducer->FinishStep());  // every gradient is the group's average
//
// Step:      BeginStep -> GradientReady for each trained parameter, in any order -> FinishStep.
//            Buckets are sent in index order, asynchronously, as soon as all their gradients are
//            announced and all ranks have reported that they reduce.
// Plans:     the first plan has one bucket per (dtype, device). The first synchronising step
//            records the order in which gradients arrive, and all ranks adopt the order of the
//            lowest active rank when the next step begins. A change of the set of trained
//            parameters makes a new plan, and the order is recorded again. Each plan is a new
//            generation, and a value: another run can pass plan_state().Serialize() to
//            ImportPlan(), and then needs neither the first plan nor tuning.
// Modes:     copies (gradients are copied into buckets and back), or gradients as bucket views (no
//            copy; `grad` of each trained parameter points into its bucket, stable within a
//            generation). Both allow zeroing gradients as well as setting them to none.
// Devices:   in a group on a device all work is enqueued on ParameterSet::stream(), which must be
//            set. A bucket's gradients are copied in one launch when the last of them is announced
//            (until then they must not change), its collective begins after that, and FinishStep()
//            returns when all work is enqueued, the averages included: later work on the stream
//            sees them. The host waits for the device only in a step in which this rank lacks a
//            gradient (it must learn whether another rank has it), for a new plan, and at the end.
//            Device errors are reported asynchronously, at the latest by the next BeginStep().
//            Sparse parameters and tuning are Unimplemented.
// Graphs:    within a generation buckets do not move, nor do gradients that are views; copies
//            neither allocate nor wait while gradients do not move. So forward, backward and an
//            optimizer's update can be captured into CUDA graphs, again after each change of
//            generation(), and replayed on the stream: BeginStep(), replay, announce all,
//            FinishStep(). The step itself cannot be captured: ranks agree on it on the host.
// Sparse:    rows are gathered from all ranks after the buckets, when the step is finished, with
//            any reduction.
// Groups:    ReplaceGroup() moves it to another group, also after an error in the middle of
//            backward.
//
// Ownership: the communicator must outlive the reducer's steps, and the parameters the reducer. A
//            parameter set has one reducer at a time: destroy it before the next one is made.
//            Destruction gives gradients their own memory back; inside a step it ends the group,
//            whose operations use the buckets.
// Threads:   one thread runs steps. GradientReady() and NoGradient() are thread-safe in a step:
//            each thread of backward announces the gradients that it has computed, and has returned
//            before the step's thread calls CheckComplete() or FinishStep().
// Errors:    FailedPrecondition names the parameters without a gradient, with two, or with an
//            unexpected one; the group ends, because other ranks cannot finish the step. No
//            gradient ever remains local without an error.
// Source:    Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.

#ifndef EVENKEEL_BUCKET_REDUCER_REDUCER_H_
#define EVENKEEL_BUCKET_REDUCER_REDUCER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

enum class StepMode {
  kSync,        // This step's gradients, with all that was accumulated before, are reduced.
  kAccumulate,  // Gradients stay local and add up.
};

struct ReducerOptions {
  std::vector<Bytes> caps = {kDefaultFirstCap, kDefaultCap};
  CapOrder cap_order = CapOrder::kFromFirstReady;
  bool gradient_as_bucket_view = false;
  // The memory from which a bucket's gradients are sent: one block into which they are copied, or
  // their own.
  Fusion fusion = Fusion::kFlat;
  // A parameter that backward has not announced at the end of the step has no gradient on this
  // rank; if false, this is an error. Call MarkUnused() early: buckets wait for all their
  // gradients.
  bool find_unused = false;
  // Buckets without a gradient on any rank are not sent. This costs one small all-reduce per step,
  // and buckets wait for MarkUnused() of every rank.
  bool skip_unused_buckets = false;
  // Names of parameters whose gradients are sent last, one bucket per element type, and only after
  // backward has announced the gradient of `delay_until`, which may be one of them. Their reduction
  // then does not delay your own collectives in backward (an all-to-all). Set both or neither,
  // equal on all ranks. While `delay_until` is frozen, they are only sent last.
  std::vector<std::string> delayed;
  std::string delay_until;
  // The graph is the same in every step, so a gradient may be announced several times: after each
  // use of the parameter, after each of several forwards. The first step counts, and reduces at its
  // end; a later one that differs is an error.
  bool static_graph = false;
  // Tests each gradient before it is reduced. One that is infinite or not a number ends the group:
  // every rank returns an error with the rank, the parameter and the step. EVENKEEL_CHECK_FINITE=1
  // does the same. On the CPU only; not with a loss scaler or skip_nonfinite, which expect such
  // gradients.
  bool check_finite = false;
  // Chooses other caps once the gradient order is known: some steps are measured, and all ranks
  // agree on the caps that leave the least communication after backward. The plan keeps them: an
  // imported plan is not tuned again.
  bool tune = false;
  int tuning_steps = 5;       // The number of steps that are measured.
  int64_t stats_every = 100;  // After the first ten steps, one in this many is measured (stats.h).
};

inline constexpr int kNewestPlan = -1;

class Reducer {
 public:
  // A collective: an error on one rank is an error on all. `name` must be unique in the group and
  // equal on all ranks; a null `reduction` means all-reduce.
  static absl::StatusOr<std::unique_ptr<Reducer>> Create(
      Communicator* comm, ParameterSet* params, absl::string_view name, ReducerOptions options,
      std::unique_ptr<BucketReduction> reduction = nullptr);
  // Returns the error that Create() would return for these. A set without trained parameters is
  // allowed.
  static absl::Status Check(const Communicator& comm, const ParameterSet& params,
                            const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a step, on active ranks ----------------------------------------------------------------
  // Adopts the recorded order, if there is a new one. BeginStep() does this, too; public for
  // callers that need the buckets earlier. A collective.
  absl::Status RebuildNow();
  // Makes a new plan if the set of trained parameters has changed. FailedPrecondition, and nothing
  // is changed, if a parameter that is frozen now holds a local gradient that would be lost.
  absl::Status RefreshTrainable();
  void PrepareStep();
  absl::Status WaitForValues();
  // GradientReducer.
  absl::Status InstallReduction(std::unique_ptr<BucketReduction> reduction);

  // Moves it to another group with its memory and its name. Drops a running step, which ends the
  // old group if that still works, and makes the gradients' state kNone. The ranks adopt the newest
  // of their plans, or that of rank `plan_from`; an order that was recorded but not adopted is
  // recorded again. A collective of the new group. After a failure it is in the new group, which
  // has ended.
  absl::Status ReplaceGroup(Communicator* comm, int plan_from = kNewestPlan);
  // Returns OK if the parameters are on the device of that group.
  static absl::Status CheckGroup(const Communicator& comm, const ParameterSet& params);
  // On a device: adds other operations whose errors the next BeginStep() reports, too.
  void Confirm(std::vector<Work> works);
  // Returns, on a device after the group's end, whether the averages of all finished steps exist.
  absl::Status CheckFinished() const;

  // A step ----------------------------------------------------------------------------------------
  // `divisor`: divides the sums.
  absl::Status BeginStep(std::shared_ptr<StepTicket> ticket, StepMode mode, StepDivisor divisor);
  // Announces that the gradient is final: it was written, or added to, and its state set to kLocal.
  absl::Status GradientReady(int param);
  // Announces that this rank has no gradient for the parameter in this step: it adds nothing, but
  // receives the average of the others. If no rank has one, the gradient's state is kNone.
  absl::Status NoGradient(int param);
  // Announces the same for all parameters that backward will not reach, before it begins; once per
  // step, possibly with an empty list.
  absl::Status MarkUnused(absl::Span<const int> params);
  // Returns OK if FinishStep() has all that it needs from this rank. Does not wait, nor change
  // anything.
  absl::Status CheckComplete() const;
  absl::Status FinishStep();
  bool in_step() const;
  // Returns what exhausted ranks need for the reduction in the step that begins.
  std::string StepMessage();

  // Shadow the step on an exhausted rank, which contributes only what it had accumulated before.
  // The first call issues all buckets, the second waits for them. `message`: the StepMessage() of
  // the lowest active rank.
  absl::Status BeginShadow(const StepAnswer& answer, const StepDivisor& divisor,
                           absl::string_view message);
  absl::Status FinishShadow();

  // The plan in force -----------------------------------------------------------------------------
  // References are valid until the next plan.
  const BucketPlan& plan() const;
  const std::vector<BucketInfo>& buckets() const;
  uint64_t generation() const;
  // Returns the collectives of a synchronising step, in order.
  const Schedule& schedule() const;
  const PlanState& plan_state() const;
  // Adopts the plan of another rank, with its set of trained parameters.
  absl::Status ImportPlan(const PlanState& state);
  const StepTimes& last_step() const;
  // Computes the statistics; allocates.
  ReducerStats stats() const;
  // Returns a number that grows with each reduction, shadowed ones included, and in another group:
  // whenever parameters may be updated next.
  int64_t reductions() const;

 private:
  struct Impl;
  explicit Reducer(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_REDUCER_H_
