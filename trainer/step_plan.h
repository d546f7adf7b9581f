// How many batches each rank has in each epoch, and how many steps the group makes of them.
//
//   EK_ASSIGN_OR_RETURN(const StepPlan plan, MakeStepPlan({.world_size = 2, .samples = 60000, .batch_size = 96,
//                                                          .epochs = 4}));
//   plan.batches                // {313, 312}: the group takes 313 steps per epoch
//   plan.BatchesOf(1, 3)        // rank 1's batches in the last epoch: 312
//   plan.FirstStep(3)           // 939
//
// A step is one of the group's: it happens as long as any rank has a batch. The ranks' batches of an epoch all begin
// with its first step, so that a rank's batch b is always part of step FirstStep(epoch) + b.
//
// Threads: pure.
// Errors:  InvalidArgument with the numbers: too few samples for the ranks, limits that do not fit.

#ifndef EVENKEEL_TRAINER_STEP_PLAN_H_
#define EVENKEEL_TRAINER_STEP_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

struct StepPlanOptions {
  int world_size = 1;
  int64_t samples = 0;
  int64_t batch_size = 1;
  int epochs = 1;
  int64_t max_steps = 0;            // Of the group, over all epochs; 0: no limit.
  std::vector<int64_t> rank_steps;  // Batches of each rank per epoch; empty: all that the data has for it.
  bool must_be_even = false;        // Uneven numbers of batches are an error that names the ranks.
  bool stops_early = false;         // Training ends with the first step that a rank has no batch for.
};

struct StepPlan {
  std::vector<int64_t> batches;  // By rank, per epoch.
  int64_t steps_per_epoch = 0;
  int64_t total_steps = 0;

  bool is_uneven() const;
  // Epochs that have a step; the last one may be cut short.
  int epochs() const;
  int64_t FirstStep(int epoch) const { return epoch * steps_per_epoch; }
  // What `rank` has in `epoch`, as far as max_steps lets it.
  int64_t BatchesOf(int rank, int epoch) const;

 private:
  friend absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);
  int64_t step_limit_ = 0;  // total_steps, except that stopping early is for the ranks to find out.
};

absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_STEP_PLAN_H_
