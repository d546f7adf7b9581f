#include "evenkeel/trainer/step_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/sampler.h"

namespace evenkeel {
namespace {

absl::StatusOr<std::vector<int64_t>> BatchesByRank(const StepPlanOptions& options) {
  const bool has_limits = !options.rank_steps.empty();
  if (has_limits && options.rank_steps.size() != static_cast<size_t>(options.world_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rank_steps has ", options.rank_steps.size(), " numbers for ", options.world_size, " ranks"));
  }
  std::vector<int64_t> batches;
  for (int rank = 0; rank < options.world_size; ++rank) {
    const BatchPlan plan{.samples = options.samples,
                         .batch_size = options.batch_size,
                         .rank = rank,
                         .world_size = options.world_size,
                         .max_batches = has_limits ? options.rank_steps[rank] : kNoBatchLimit};
    EK_RETURN_IF_ERROR(CheckBatchPlan(plan));
    batches.push_back(BatchCount(plan));
    if (has_limits && batches[rank] < options.rank_steps[rank]) {
      return absl::InvalidArgumentError(absl::StrCat("--rank_steps asks for ", options.rank_steps[rank],
                                                     " batches on rank ", rank, ", and the data has ", batches[rank],
                                                     " for it"));
    }
  }
  return batches;
}

absl::Status CheckEven(const StepPlan& plan) {
  const auto [fewest, most] = std::minmax_element(plan.batches.begin(), plan.batches.end());
  const int rank_of_fewest = static_cast<int>(fewest - plan.batches.begin());
  const int rank_of_most = static_cast<int>(most - plan.batches.begin());
  // max_steps may cut all of them to the same number.
  if (plan.BatchesOf(rank_of_fewest, 0) == plan.BatchesOf(rank_of_most, 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("without --join every rank needs as many batches, but rank ",
                                                 rank_of_most, " has ", *most, " and rank ", rank_of_fewest, " has ",
                                                 *fewest));
}

}  // namespace

bool StepPlan::is_uneven() const {
  return std::any_of(batches.begin(), batches.end(), [this](int64_t count) { return count != batches[0]; });
}

int StepPlan::epochs() const { return static_cast<int>((step_limit_ + steps_per_epoch - 1) / steps_per_epoch); }

int64_t StepPlan::BatchesOf(int rank, int epoch) const {
  return std::clamp<int64_t>(step_limit_ - FirstStep(epoch), 0, batches[rank]);
}

absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options) {
  StepPlan plan;
  EK_ASSIGN_OR_RETURN(plan.batches, BatchesByRank(options));
  plan.steps_per_epoch = *std::max_element(plan.batches.begin(), plan.batches.end());
  if (plan.steps_per_epoch == 0) return absl::InvalidArgumentError("--rank_steps leaves no rank a batch to train on");
  const int64_t limit = options.max_steps > 0 ? options.max_steps : std::numeric_limits<int64_t>::max();
  plan.step_limit_ = std::min(options.epochs * plan.steps_per_epoch, limit);
  plan.total_steps = plan.step_limit_;
  if (options.must_be_even) EK_RETURN_IF_ERROR(CheckEven(plan));
  if (options.stops_early && plan.is_uneven()) {
    plan.total_steps = std::min(plan.total_steps, *std::min_element(plan.batches.begin(), plan.batches.end()));
  }
  return plan;
}

}  // namespace evenkeel
