// An optimizer: SGD, Adam or AdamW over a set of parameters, with its state on every rank or split
// over the ranks. The results are the same, bit for bit where sums have a fixed order.
//
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers));
//   EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, AdamW{.learning_rate = 3e-4},
//                                                         {.placement = Slices{}}));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ... forward, backward, which announces gradients to ddp ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());
//     EK_RETURN_IF_ERROR(optimizer->Step());          // the parameters are updated, on all ranks
//   }
//   EK_RETURN_IF_ERROR(optimizer->Save("checkpoints/last"));               // state_access.h
//
// Step() updates every parameter that is trained and has a gradient. The others do not change, nor
// do their decay and step count.
//
// Placement:     determines which rank keeps the state of which elements and updates them (below).
//                In evenkeel's sources docs/optimizers.md compares the placements.
// Gradients:     a DataParallel reduces them: Create() with a reducer installs the reduction that
//                the placement needs. WholeTensors also averages gradients that are still local, to
//                their owner only; their state is kNone afterwards. The others refuse these.
// Trainability:  a change of the set of trained parameters takes effect in the next step. A frozen
//                parameter keeps its state.
// Join:          put it and the DataParallel into RunJoined()'s list. Exhausted ranks take every
//                step, with the settings of the lowest active rank, so that weights, moments and
//                step counts stay equal on all ranks.
// Your own code: inside RunJoined() exhausted ranks do not run the code of the loop: pass to
//                BeforeUpdate() what changes gradients between FinishStep() and Step(), and to
//                AfterUpdate() what changes values, averages and schedules. Clearing gradients,
//                freezing parameters or a further Step() between FinishStep() and the next
//                BeginStep() needs neither: it counts on exhausted ranks, too, with every
//                placement. With update_in_backward it is too late then, and an error.
// Compared:      the settings of each step, and which parameters have no gradient in it, with the
//                next step or at the loop's end. In steps with exhausted ranks also the values, and
//                the reduced gradients, as Step() finds them: a change that only loops have made is
//                an error that names the tensor. Each rank reads them once then. With Slices the
//                memory of gradients must not change between FinishStep() and Step(), which is
//                checked in the same steps, and in the first ones. On a device, and for values with
//                Replicated{.update_in_backward}, only the loop's end finds changes.
// Replicas:      OptimizerOptions::check_replicas compares Replicated state at regular steps.
//                The other placements have it once; DataParallelOptions::check_replicas compares
//                the parameters of all of them (bucket/replica_check.h).
// Settings:      call SetLearningRate() between steps, with equal values on all ranks; an exhausted
//                rank receives them with the next step, or at the end of the loop.
// Groups:        ReplaceGroup() and Recover() (join/recovery.h) move it to another group, together
//                with the DataParallel. Split state is distributed again. The part of a lost rank
//                is lost, and OptimizerOptions::lost_shard decides what follows; so is the part of
//                a rank that was in the middle of an update, or a step ahead.
// Types:         floats on the CPU. The state of a 16-bit parameter is float32 and includes a
//                master copy (StateTensorNames()), from which each step rounds the parameter.
// Devices:       parameters of float32 or bfloat16 on the group's device. A step is work on the
//                streams of the parameters (ParameterSet::SetStream()), the reducer and the
//                channels; the host waits for none of them, even if the step clips or skips.
//                last_check() waits for the step, check_before() for the one before it, which has
//                usually ended. The functions that read or move state wait, too, and possibly the
//                first step of a new plan. Weights and checkpoints equal those on the CPU bit for
//                bit, except that bias corrections and the norms for clipping may differ in the
//                last bits of a double.
// Ownership:     the communicator must outlive its use, and the parameters must outlive it. It and
//                its reducer may be destroyed in any order; the reducer refuses later steps. Create
//                it on all ranks in the same order.
// Threads:       thread-compatible. With update_in_backward, buckets are updated on a thread of the
//                reducer.
// Errors:        InvalidArgument for settings or a state that do not fit, or that differ between
//                the ranks (then on all ranks). FailedPrecondition from Step() for gradients that
//                the placement cannot use, or if the ranks train different parameters; nothing was
//                updated then. Unimplemented, with the placement, for calls that it lacks.
// Source:        Rajbhandari et al., "ZeRO", SC 2020, stage 1; whole tensors as PyTorch's
//                ZeroRedundancyOptimizer.

#ifndef EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_
#define EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/replica_check.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/partition.h"
#include "evenkeel/zero_optim/state_access.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

// `update_in_backward`: each bucket is updated as soon as it is reduced, while backward continues
// with others. No gradient outlives the step. A gradient must be announced only when backward does
// not need its parameter any more. The settings are those at BeginStep(). Whatever needs all
// gradients before the first update is not available: clipping, skipping, a loss scale,
// CheckGradients(). A step that fails may have updated some parameters: Recover() takes the state
// of a rank that has not begun such a step; with Replicated it returns an error if none exists.

// Each rank has all state. A step does not communicate while all ranks have inputs. With
// update_in_backward, FinishStep() ends the update and Step() returns FailedPrecondition; except if
// ReductionOptions::params leaves parameters to Step(), which then updates them, without clipping,
// skipping or a scale.
struct Replicated {
  bool update_in_backward = false;
  friend bool operator==(const Replicated&, const Replicated&) = default;
};

// Each parameter has one owner, which alone keeps its moments, updates it and broadcasts the
// result. A parameter gets its owner and its state when it is trained for the first time.
struct WholeTensors {
  // State moves to other owners in the next step if the rank with the most trained elements has
  // more than this multiple of the mean, and another assignment would have less. Infinite: never.
  // The first assignment by size cannot be improved, so nothing moves until the set of trained
  // parameters changes.
  double max_imbalance = 2.0;
  // Cap of the buckets in which updated parameters are sent and Step() reduces gradients.
  Bytes bucket_cap = kDefaultCap;
  friend bool operator==(const WholeTensors&, const WholeTensors&) = default;
};

// Each rank keeps, and updates, the same number of elements of every gradient bucket: count / N
// elements of state, and at most 16 per bucket more, from a parameter's first update on. Gradients
// are reduce-scattered, which is half the traffic of an all-reduce, and their state is kNone
// afterwards; updated parameters are gathered into their own memory. Traffic per rank: (N - 1) / N
// of the gradients, as much of the parameters, and one float per parameter for whether any rank has
// its gradient. When buckets change (the gradient order of the first step, the set of trained
// parameters), state moves to its new ranks in the next synchronising step. The reducer trains only
// parameters of this optimizer's groups. With update_in_backward, Step() takes no options and waits
// for the updates in flight.
struct Slices {
  bool update_in_backward = false;
  // Step() returns before the other ranks' slices of the parameters are received: call WaitFor()
  // before each use of a parameter.
  bool overlap_forward = false;
  friend bool operator==(const Slices&, const Slices&) = default;
};

using Placement = std::variant<Replicated, WholeTensors, Slices>;

struct OptimizerOptions {
  Placement placement = Replicated{};
  LostShard lost_shard = LostShard::kRefuse;  // For split state.
  // The checkpoint that the message of kRefuse names. SetCheckpointHint() changes it.
  std::string checkpoint_hint;
  // For Replicated; without effect on other placements.
  ReplicaCheckOptions check_replicas;
  // For WholeTensors: tests local gradients as ReducerOptions::check_finite does.
  bool check_finite = false;
};

// For TakeReduction() of a Replicated optimizer.
struct ReductionOptions {
  std::vector<int> params;  // The parameters to update in backward; empty: all.
  std::unique_ptr<BucketReduction> inner = nullptr;  // Null means all-reduce.
};

// A part of a parameter's gradient; see Optimizer::BeforeUpdate().
struct GradientPiece {
  int param = 0;
  int64_t first = 0;    // The number of elements of the parameter before this piece.
  TensorView gradient;  // To be read, and changed in place.
};

class Optimizer : public Joinable, public StateAccess {
 public:
  // Creates an optimizer with one rule for all parameters, or with groups (parameter_groups.h), for
  // the gradients of `reducer` (a DataParallel), and installs the reduction that the placement
  // needs. A collective.
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(
      GradientReducer& reducer, const std::vector<ParameterGroup>& groups,
      OptimizerOptions options = {});
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(GradientReducer& reducer,
                                                           const UpdateRule& rule,
                                                           OptimizerOptions options = {});
  // Creates an optimizer without a reducer: for gradients that another object has reduced by
  // all-reduce or by TakeReduction(), and with WholeTensors also for local gradients. It makes
  // no values equal: broadcast those of one rank before the first step. If the parameters have no
  // DataParallel then, that step compares them (bucket/divergence.h; it waits for a device) and
  // returns FailedPrecondition on all ranks if they differ.
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(
      Communicator& comm, ParameterSet& params, const std::vector<ParameterGroup>& groups,
      OptimizerOptions options = {});
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(Communicator& comm, ParameterSet& params,
                                                           const UpdateRule& rule,
                                                           OptimizerOptions options = {});

  // Updates the parameters. A collective of all ranks with inputs, with equal options.
  virtual absl::Status Step(const StepOptions& options = {}) = 0;

  // Adds a function that runs at the start of each Step(), before norms, clipping and checks for
  // non-finite values, on all ranks: on exhausted ones in the step that they shadow. For clipping
  // by value, noise, masks of pruned weights:
  //
  //   EK_RETURN_IF_ERROR(optimizer->BeforeUpdate([](absl::Span<const GradientPiece> pieces) {
  //     for (const GradientPiece& piece : pieces)
  //       for (float& element : piece.gradient.as<float>())
  //         element = std::clamp(element, -0.5f, 0.5f);
  //     return absl::OkStatus();
  //   }));
  //
  // Pieces:  the group's gradients, in any order; grad_scale of the step has not been applied.
  //          Replicated: all of them, whole. WholeTensors: the same, but those that Step() itself
  //          reduces on their owner only. Slices: this rank's slices. So a function of single
  //          elements, with their index `first` + k, gives the same weights with every placement;
  //          a function of whole tensors needs Replicated or WholeTensors. Of a sparse parameter
  //          the piece has the elements of its rows (ParameterSet::sparse_grad()).
  // Order:   the same functions on all ranks, which is compared. They run in the order of the
  //          calls, change equal elements equally on all ranks, and must not communicate. A further
  //          Step() without a backward runs them again. CheckGradients() sees the gradients before
  //          them. On a device they put work on the parameters' stream.
  // Errors:  Step(), or RunJoined() on an exhausted rank, returns that of `function`: nothing was
  //          updated on this rank. Unimplemented with update_in_backward.
  virtual absl::Status BeforeUpdate(
      std::function<absl::Status(absl::Span<const GradientPiece>)> function) = 0;

  // Adds a function that runs at the end of each Step(), skipped ones included, on all ranks: on
  // exhausted ones at the end of the step that they shadow. For averages of the weights, clamping,
  // pruning, schedules of the rate:
  //
  //   EK_RETURN_IF_ERROR(optimizer->AfterUpdate([&] {
  //     for (float& weight : critic) weight = std::clamp(weight, -0.01f, 0.01f);
  //     return absl::OkStatus();
  //   }));
  //
  // Values:  with every placement those of all parameters, whole and equal on all ranks. It may
  //          change them, equally on all ranks; those of 16 bits have no effect on the next step,
  //          which rounds them from the master copy. Gradients and state are not available.
  // Order:   the same functions on all ranks, which is compared; they run in the order of the calls
  //          and must not communicate. On a device they put work on the parameters' stream.
  // Cost:    with Slices{.overlap_forward = true}, Step() waits for the values.
  // Errors:  Step(), or RunJoined() on an exhausted rank, returns that of `function`: the step has
  //          been taken. Unimplemented with Replicated{.update_in_backward = true}.
  virtual absl::Status AfterUpdate(std::function<absl::Status()> function) = 0;

  // Returns a norm of the gradients, and whether they are finite, before Step() in the same step.
  // Equal on all ranks; a collective of the ranks that call Step(). WholeTensors reduces the
  // gradients that Step() would reduce.
  virtual absl::StatusOr<GradientCheck> CheckGradients(double norm = 2.0) = 0;
  // Returns the check of the last step that clipped, or skipped non-finite gradients; equal on all
  // ranks. With Slices, and on a device with WholeTensors, the norm may differ in the last bits
  // between world sizes.
  virtual const std::optional<GradientCheck>& last_check() const = 0;
  // Returns the check of the step before the last. On a device it is available earlier, so that a
  // loop that reads it does not make the host wait for the step that has just begun.
  virtual const std::optional<GradientCheck>& check_before() const = 0;

  // Returns the latest settings.
  virtual const ParameterGroups& groups() const = 0;
  // Sets the rate of all groups, or of one.
  absl::Status SetLearningRate(double learning_rate) {
    return settings().SetLearningRate(learning_rate);
  }
  absl::Status SetLearningRate(absl::string_view group, double learning_rate) {
    return settings().SetLearningRate(group, learning_rate);
  }
  // Adds a group of parameters that were in none. Trained ones get owners, and no other state
  // moves. A collective, between steps, not inside RunJoined().
  virtual absl::Status AddGroup(ParameterGroup group) = 0;

  // Returns the reduction of Slices, or of Replicated with update_in_backward, for the only reducer
  // of the gradients. Needed only for composed reductions; else Create() installs it:
  //
  //   EK_ASSIGN_OR_RETURN(
  //       auto reduction,
  //       optimizer->TakeReduction({.params = {1, 3}, .inner = std::move(compressed)}));
  //   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {},
  //                                                      std::move(reduction)));
  //
  // Parameters outside of `params` keep their gradients, and Step() updates them. On a
  // device all parameters of a bucket are updated in backward, or none; else Unimplemented.
  // FailedPrecondition: it was taken already. InvalidArgument: `params` has a parameter twice or
  // one of another optimizer; or, when the reducer is made, `inner` does not provide the existing
  // gradients before OnReduced() (UsedFlags::kSeparate), or leaves no gradients.
  virtual absl::StatusOr<std::unique_ptr<BucketReduction>> TakeReduction(
      ReductionOptions options = {}) = 0;

  // Waits until parameter `param`, or each one, is updated; on a device its stream waits. Needed
  // only with overlap_forward, before the parameter is read or passed to another object. The next
  // reduction, Consolidate() and the end of RunJoined() wait by themselves.
  virtual absl::Status WaitFor(int param) = 0;
  virtual absl::Status WaitForAll() = 0;

  virtual const Placement& placement() const = 0;
  // Returns the owner with WholeTensors; kNoOwner for a parameter that was never trained or is in
  // no group, and for other placements.
  virtual int owner(int param) const = 0;
  // Returns the trained elements of the rank with the most, divided by the mean; 1 for placements
  // that are always balanced.
  virtual double imbalance() const = 0;
  // Assigns new owners to the parameters that the last step trained, and moves their state, if this
  // lowers the largest number of trained elements on one rank. WholeTensors only. A collective,
  // between steps; inside RunJoined() after Step().
  virtual absl::Status Rebalance() = 0;

  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }

 protected:
  using Joinable::Joinable;

 private:
  virtual ParameterGroups& settings() = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_
