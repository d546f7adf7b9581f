// The number of batches of each rank in each epoch, and the steps of the group for them.
//
//   EK_ASSIGN_OR_RETURN(const StepPlan plan, MakeStepPlan({.world_size = 2, .samples = 60000,
//                                                          .batch_size = 96, .epochs = 4}));
//   plan.batches                // {313, 312}: the group takes 313 steps per epoch
//   plan.BatchesOf(1, 3)        // rank 1's batches in the last epoch: 312
//   plan.FirstStep(3)           // 939
//
// A step is one of the group's: it is run as long as any rank has a batch. The ranks' batches of an
// epoch all begin with its first step, so that a rank's batch b is always part of step
// FirstStep(epoch) + b.
//
// When ranks are lost, the others continue with a plan of their own, which redistributes the
// samples that no finished step has used:
//
//   EK_ASSIGN_OR_RETURN(const StepPlan next,
//                       plan.GoOn(plan.PositionAfter(/*steps=*/412), /*world_size=*/1));
//   next.begin                  // {.epoch = 1, .step = 412, .samples = 99 * 2 * 96}
//   next.BatchesOf(0, 1)        // 427: the rest of epoch 1, from step 412 on
//
// Threads: pure functions.
// Errors:  InvalidArgument with the numbers: too few samples for the ranks, limits that do not fit;
//          a plan with rank_steps or stops_early cannot continue with different ranks.

#ifndef EVENKEEL_TRAINER_DATA_STEP_PLAN_H_
#define EVENKEEL_TRAINER_DATA_STEP_PLAN_H_

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
  int64_t max_steps = 0;            // The group's, over all epochs; 0: no limit.
  std::vector<int64_t> rank_steps;  // Batches of each rank per epoch; empty: all the data.
  bool must_be_even = false;  // Uneven numbers of batches are an error, which names the ranks.
  bool stops_early = false;   // Training ends at the first step for which a rank has no batch.
  // Every rank has a part of each step's samples, by its speed, and so as many batches as the group
  // has steps; in the last step of an epoch it may have none.
  bool balances = false;
  EpochPosition begin;  // The part of the run before it is done already.
};

struct StepPlan {
  std::vector<int64_t> batches;        // By rank, in a whole epoch.
  EpochPosition begin;                 // The plan's start: the beginning of the run or of its rest.
  std::vector<int64_t> begin_batches;  // By rank, in the rest of epoch begin.epoch.
  int64_t steps_per_epoch = 0;         // In a whole epoch.
  int64_t total_steps = 0;             // At the end of all epochs.

  bool is_uneven() const;
  // Returns the number of epochs with a step, those before `begin` included; the last one may be
  // shortened.
  int epochs() const;
  // Returns the first step of `epoch`, from begin.epoch on; in that one, the first step of the
  // plan.
  int64_t FirstStep(int epoch) const;
  // Returns the batches of `rank` in `epoch`, from begin.epoch on, within max_steps.
  int64_t BatchesOf(int rank, int epoch) const;

  // Returns the position after `steps` of the group, counted from the beginning of the run: the end
  // of an epoch rather than the beginning of the next one, unless `epochs_done` epochs are over.
  EpochPosition PositionAfter(int64_t steps, int epochs_done = 0) const;
  absl::StatusOr<StepPlan> GoOn(const EpochPosition& from, int world_size) const;

 private:
  friend absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);
  int64_t end_of(int epoch) const;

  StepPlanOptions options_;
  // total_steps, without the effect of stops_early, which the ranks find at run time.
  int64_t step_limit_ = 0;
};

absl::StatusOr<StepPlan> MakeStepPlan(const StepPlanOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_STEP_PLAN_H_
