// The placement Replicated: each rank has all state, and updates all parameters, in Step() or as
// soon as their bucket is reduced (replicated_reduction.cc).

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_REPLICATED_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_REPLICATED_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/zero_optim/internal/placement/owner_link.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"
#include "evenkeel/zero_optim/internal/step_message.h"

namespace evenkeel::internal {

class ReplicatedOptimizer : public PlacedOptimizer {
 public:
  ReplicatedOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                      OptimizerOptions options)
      : PlacedOptimizer(comm, params, std::move(groups), std::move(options)) {}
  ~ReplicatedOptimizer() override { link_->Cut(); }

  absl::Status Step(const StepOptions& options) override;
  absl::StatusOr<GradientCheck> CheckGradients(double norm) override;
  absl::StatusOr<std::unique_ptr<BucketReduction>> TakeReduction(ReductionOptions options) override;
  absl::StatusOr<StatePieces> Pieces() override;

 private:
  class Reduction;
  enum class InBackward { kNothing, kPart, kAll };

  absl::StatusOr<StepMessage> PlanStep(const StepOptions& options) const;
  absl::Status Apply(const StepMessage& step);
  absl::Status ApplyThere(const StepMessage& step);  // On a device.
  absl::Status EndStep(const StepMessage& step);     // Compares the state, if that is due.
  GradientCheck Measure(const StepMessage& step, double norm) const;
  std::vector<ParameterUpdater::Gradient> GradientsOf(const StepMessage& step) const;

  // PlacedOptimizer.
  std::vector<Fact> OtherSettings() const override;
  absl::Status RepeatStep(const StepAnswer& answer, const StepMessage& step) override;
  Holders HoldersOf(int param) const override {
    return {{.begin = 0, .end = WholeOf(param).count, .rank = kAllRanks}};
  }
  absl::Status TakeState(const OptimizerState& state, const std::map<int, int64_t>& steps,
                         const Ranges& ranges, OptimizerState* movable) override;

  // Joinable.
  absl::Status OnEnter(const GroupChange& change) override;
  HeldState CheckState() const override;
  absl::Status TakeOverState(Channel& channel, StateTransfer& transfer) override;
  absl::Status SendState(Channel& channel, int source);

  const std::shared_ptr<OwnerLink<ReplicatedOptimizer>> link_ =
      std::make_shared<OwnerLink<ReplicatedOptimizer>>(this, join_name());
  InBackward in_backward_ = InBackward::kNothing;  // How much is updated in backward.
  bool is_torn_ = false;  // A step that updates in backward has begun to, and has not ended.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_REPLICATED_H_
