// The placement WholeTensors: each parameter has one owner, which alone keeps its state, updates it
// and sends out the result. The comment at the top of whole_tensors_step.cc explains how a step
// runs.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_WHOLE_TENSORS_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_WHOLE_TENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/gradient_reduction.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"
#include "evenkeel/zero_optim/internal/placement/shard_move.h"
#include "evenkeel/zero_optim/internal/placement/shard_plan.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/partition.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel::internal {

class WholeTensorsOptimizer : public PlacedOptimizer {
 public:
  WholeTensorsOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                        OptimizerOptions options);
  ~WholeTensorsOptimizer() override;

  absl::Status Step(const StepOptions& options) override;
  absl::StatusOr<GradientCheck> CheckGradients(double norm) override;
  int owner(int param) const override { return plan()->owners.owner(param); }
  double imbalance() const override;
  absl::Status Rebalance() override;
  absl::StatusOr<StatePieces> Pieces() override;

 private:
  using PlanPtr = std::shared_ptr<const ShardPlan>;

  absl::StatusOr<ParticipantState> PrepareStep() override;
  ParticipantState CurrentState() const override;
  std::string ExportState() const override;
  absl::Status ImportState(absl::string_view state) override;

  PlanPtr plan() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The plan for `mask`, with owners for those in `also_owned` and for what `mask` trains, where
  // there is none.
  absl::Status AdoptMask(const TrainableMask& mask, const std::set<int>& also_owned = {});
  absl::Status SetPlan(OwnerTable owners, const TrainableMask& mask, uint64_t generation)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The gradients of the step that runs: chosen, and maybe reduced already.
  struct Gradients {
    StepAnswer answer;
    std::shared_ptr<StepTicket> ticket;   // Null on a rank without inputs.
    std::vector<GradientSource> sources;  // As the lowest active rank sees them.
    std::vector<uint64_t> hashes;         // StepMessage::hashes.
    std::vector<int> to_reduce;
    double scale = 1.0;  // For the gradients to reduce.
    bool is_reduced = false;
  };
  absl::Status ChooseGradients();
  absl::Status TakeGradients(StepAnswer answer, std::vector<GradientSource> sources);
  absl::Status CheckOwnGradients();
  absl::Status ReduceGradients();
  absl::StatusOr<TensorView> GradientOf(int param);
  // Those of `params` that this rank owns and that have one.
  absl::StatusOr<std::vector<ParameterUpdater::Gradient>> OwnGradients(
      const std::vector<int>& params);
  absl::StatusOr<GradientCheck> Measure(double norm, double grad_scale);
  absl::Status DecideThere(
      const StepOptions& options);  // On a device, which the host does not wait for.
  // Returns the step with the chosen gradients.
  StepMessage StepWith(const StepOptions& options) const;
  // Chooses the gradients of a step that is to be repeated.
  absl::Status AdoptStep(const StepAnswer& answer, const StepMessage& step);
  absl::Status Run(const StepOptions& options);
  absl::Status RunBefore(const StepOptions& options);
  absl::Status UpdateAndSend(double grad_scale);
  absl::Status UpdateBucket(int index, const ShardBucket& bucket, double grad_scale);

  // PlacedOptimizer.
  absl::Status Init() override;
  std::vector<Fact> OtherSettings() const override;
  absl::Status OnChannel() override;
  void OnLoopBegin() override;
  absl::Status OnExhausted() override;
  // Returns an error if samples cannot be told from those of gradients that were cleared.
  absl::Status CheckSamples() const;
  absl::Status RepeatStep(const StepAnswer& answer, const StepMessage& step) override;
  absl::Status RepeatCheck(const StepAnswer& answer, const StepMessage& step) override;
  absl::Status RebalanceNow() override;
  absl::Status TakeGroups(ParameterGroups groups) override;
  Holders HoldersOf(int param) const override {
    return {{.begin = 0, .end = WholeOf(param).count, .rank = owner(param)}};
  }
  absl::Status AddUpSteps(std::vector<int64_t>& steps) override;
  Ranges RangesToLoad() const override;
  absl::Status TakeState(const OptimizerState& state, const std::map<int, int64_t>& steps,
                         const Ranges& ranges, OptimizerState* movable) override;

  // Joinable.
  void OnLeave(Communicator* old) override;
  absl::Status OnEnter(const GroupChange& change) override;
  HeldState CheckState() const override;
  OwnerTable NobodyOwns() const;
  ShardFacts Facts() const;
  absl::Status MoveState(const ShardMove& move);
  std::vector<std::vector<int>> ParamsByGroup() const;
  absl::Status MoveTo(const OwnerTable& owners);
  // State that changes its owner. What arrives is kept beside what is there until all ranks have
  // all of theirs: a failure before that changes nothing.
  struct OwnerMove {
    std::vector<int> from;  // By parameter: the rank that has its state; -1: there is none.
    OwnerTable to;
    std::vector<int64_t> steps;  // By parameter: updates so far.

    bool Moves(int param) const { return from[param] >= 0 && from[param] != to.owner(param); }
  };
  using Arrivals = std::map<int, std::vector<HeldTensor>>;
  absl::StatusOr<Arrivals> Bring(const OwnerMove& move);
  absl::Status Adopt(const OwnerMove& move, Arrivals arrivals);

  const double max_imbalance_;
  const Bytes bucket_cap_;
  const std::vector<ParamSpec> specs_;
  const std::vector<int> all_params_;
  std::unique_ptr<GradientReduction> reduction_;
  bool checks_finite_ = false;
  uint64_t seen_mask_version_ = 0;  // The mask's when the plan was made.
  std::optional<Gradients> gradients_;
  // Where no DataParallel counts samples: those in local gradients that a loop has left, and
  // ParameterSet::dropped_gradients() when the last step, or the loop, began.
  int64_t left_samples_ = 0, seen_drops_ = 0;
  std::vector<uint8_t> was_updated_;  // By parameter: a step for it; on a device its owner may have
                                      // skipped them all.
  int held_rank_ = 0;                 // In the group that the plan's owners are ranks of.
  bool is_torn_ =
      false;        // An update began and did not end; on a device: was not put there as a whole.
  OpenWorks open_;  // On a device: what the end of updates depends on.

  mutable absl::Mutex mutex_;  // The control thread reads the plan, too.
  PlanPtr plan_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_WHOLE_TENSORS_H_
