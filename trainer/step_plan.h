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
// When ranks are lost, the others go on with a plan of their own, which deals out what no finished step has used:
//
//   EK_ASSIGN_OR_RETURN(const StepPlan next, plan.GoOn(plan.PositionAfter(/*steps=*/412), /*world_size=*/1));
//   next.begin                  // {.epoch = 1, .step = 412, .samples = 99 * 2 * 96}
//   next.BatchesOf(0, 1)        // 427: of the rest of epoch 1; they begin with step 412
//
// Threads: pure.
// Errors:  InvalidArgument with the numbers: too few samples for the ranks, limits that do not fit; a plan with
//          rank_steps or stops_early does not go on with other ranks.

#ifndef EVENKEEL_TRAINER_STEP_PLAN_H_
#define EVENKEEL_TRAINER_STEP_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

// A place in a run.
struct EpochPosition {
  int epoch = 0;
  int64_t step = 0;     // Steps of the group before it, in all epochs.
  int64_t samples = 0;  // Samples of the epoch before it.
  friend bool operator==(const EpochPosition&, const EpochPosition&) = default;
};

struct StepPlanOptions {
  int world_size = 1;
  int64_t samples = 0;
  int64_t batch_size = 1;
  int epochs = 1;
  int64_t max_steps = 0;            // Of the group, over all epochs; 0: no limit.
  std::vector<int64_t> rank_steps;  // Batches of each rank per epoch; empty: all that the data has for it.
  bool must_be_even = false;        // Uneven numbers of batches are an error that names the ranks.
  bool stops_early = false;         // Training ends with the first step that a rank has no batch for.
  EpochPosition begin;              // Others have done what comes before.
};

struct StepPlan {
  std::vector<int64_t> batches;        // By rank, in a whole epoch.
  EpochPosition begin;                 // Of the plan: the beginning, or where it took over.
  std::vector<int64_t> begin_batches;  // By rank, in the rest of epoch begin.epoch.
  int64_t steps_per_epoch = 0;         // A whole one.
  int64_t total_steps = 0;             // At the end of all epochs.

  bool is_uneven() const;
  // Epochs that have a step, those before `begin` included; the last one may be cut short.
  int epochs() const;
  // From begin.epoch on; there, the first step of the plan.
  int64_t FirstStep(int epoch) const;
  // What `rank` has in `epoch`, as far as max_steps lets it; from begin.epoch on.
  int64_t BatchesOf(int rank, int epoch) const;

  // After so many steps of the group, of which `begin` has had some: the end of an epoch rather than the beginning of
  // the next one, unless that many epochs are over.
  EpochPosition PositionAfter(int64_t steps, int epochs_done = 0) const;
  absl::StatusOr<StepPlan> GoOn(const EpochPosition& from, int world_size) const;

 private:
  friend absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);
  int64_t begin_steps() const;  // In epoch begin.epoch.
  int64_t end_of(int epoch) const;

  StepPlanOptions options_;
  int64_t step_limit_ = 0;  // total_steps, except that stopping early is for the ranks to find out.
};

absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_STEP_PLAN_H_
