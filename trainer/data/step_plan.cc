#include "evenkeel/trainer/data/step_plan.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/sampler.h"

namespace evenkeel {
namespace {

BatchPlan BatchesFrom(const StepPlanOptions& options, int64_t first, int rank) {
  return {.samples = options.samples,
          .first = first,
          .batch_size = options.batch_size,
          .rank = rank,
          .world_size = options.world_size,
          .max_batches = options.rank_steps.empty() ? kNoBatchLimit : options.rank_steps[rank]};
}

// Returns the batches in the part of an epoch that begins with sample `first`.
absl::StatusOr<std::vector<int64_t>> BatchesByRank(const StepPlanOptions& options, int64_t first) {
  const bool has_limits = !options.rank_steps.empty();
  if (has_limits && options.rank_steps.size() != static_cast<size_t>(options.world_size)) {
    return absl::InvalidArgumentError(absl::StrCat("--rank_steps has ", options.rank_steps.size(),
                                                   " numbers for ", options.world_size, " ranks"));
  }
  std::vector<int64_t> batches;
  for (int rank = 0; rank < options.world_size; ++rank) {
    // Rank 0 has a batch in each step.
    const BatchPlan plan = BatchesFrom(options, first, options.balances ? 0 : rank);
    EK_RETURN_IF_ERROR(CheckBatchPlan(plan));
    batches.push_back(BatchCount(plan));
    if (has_limits && batches[rank] < options.rank_steps[rank]) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rank_steps asks for ", options.rank_steps[rank], " batches on rank ",
                       rank, ", and the data has ", batches[rank], " for it"));
    }
  }
  return batches;
}

absl::Status CheckEven(const StepPlan& plan) {
  const auto [fewest, most] = std::ranges::minmax_element(plan.batches);
  const int rank_of_fewest = static_cast<int>(fewest - plan.batches.begin());
  const int rank_of_most = static_cast<int>(most - plan.batches.begin());
  // max_steps may reduce all of them to the same number.
  if (plan.BatchesOf(rank_of_fewest, 0) == plan.BatchesOf(rank_of_most, 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("without --join every rank needs the same number of batches, but rank ",
                   rank_of_most, " has ", *most, " and rank ", rank_of_fewest, " has ", *fewest));
}

}  // namespace

bool StepPlan::is_uneven() const {
  return std::ranges::any_of(batches, [this](int64_t count) { return count != batches[0]; });
}

int64_t StepPlan::end_of(int epoch) const {
  const int64_t rest = begin_batches.empty() ? 0 : std::ranges::max(begin_batches);
  return begin.step + rest + (epoch - begin.epoch) * steps_per_epoch;
}

int StepPlan::epochs() const {
  if (step_limit_ <= begin.step && begin.samples == 0) return begin.epoch;  // No step is left.
  if (step_limit_ <= end_of(begin.epoch)) return begin.epoch + 1;
  const int64_t after = step_limit_ - end_of(begin.epoch);
  return begin.epoch + 1 + static_cast<int>((after + steps_per_epoch - 1) / steps_per_epoch);
}

int64_t StepPlan::FirstStep(int epoch) const {
  return epoch <= begin.epoch ? begin.step : end_of(epoch - 1);
}

int64_t StepPlan::BatchesOf(int rank, int epoch) const {
  return std::clamp<int64_t>(step_limit_ - FirstStep(epoch), 0,
                             epoch <= begin.epoch ? begin_batches[rank] : batches[rank]);
}

EpochPosition StepPlan::PositionAfter(int64_t steps, int epochs_done) const {
  EpochPosition at{.epoch = begin.epoch, .step = steps};
  while (at.epoch + 1 < epochs() && end_of(at.epoch) < steps) ++at.epoch;
  if (at.epoch < epochs_done) return {.epoch = epochs_done, .step = steps};
  const int64_t first = at.epoch == begin.epoch ? begin.samples : 0;
  at.samples = SamplesDone(BatchesFrom(options_, first, /*rank=*/0), steps - FirstStep(at.epoch));
  return at;
}

absl::StatusOr<StepPlan> StepPlan::GoOn(const EpochPosition& from, int world_size) const {
  if (!options_.rank_steps.empty() || options_.stops_early) {
    return absl::InvalidArgumentError(
        "a run with --rank_steps or --stop_early can only be resumed with the same ranks");
  }
  StepPlanOptions options = options_;
  options.begin = from;
  options.world_size = world_size;
  return MakeStepPlan(options);
}

absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options) {
  StepPlan plan;
  plan.options_ = options;
  plan.begin = options.begin;
  EK_ASSIGN_OR_RETURN(plan.batches, BatchesByRank(options, /*first=*/0));
  plan.steps_per_epoch = std::ranges::max(plan.batches);
  if (plan.steps_per_epoch == 0)
    return absl::InvalidArgumentError("--rank_steps leaves no rank a batch to train on");
  const bool is_over = options.begin.epoch >= options.epochs;
  if (!is_over) {
    EK_ASSIGN_OR_RETURN(plan.begin_batches, BatchesByRank(options, options.begin.samples));
  }
  const int64_t limit =
      options.max_steps > 0 ? options.max_steps : std::numeric_limits<int64_t>::max();
  plan.step_limit_ = std::min(is_over ? plan.begin.step : plan.end_of(options.epochs - 1), limit);
  plan.total_steps = plan.step_limit_;
  if (options.must_be_even) EK_RETURN_IF_ERROR(CheckEven(plan));
  if (options.stops_early && plan.is_uneven())
    plan.total_steps = std::min(plan.total_steps, std::ranges::min(plan.batches));
  return plan;
}

}  // namespace evenkeel
