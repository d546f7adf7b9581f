// The divisor of the sum of the ranks' gradients, for each step.
//
//   EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, Notify());  // of a Joinable
//   EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
//   const double scale = join_config().divisor->ScaleOf(answer, /*reduces=*/true);
//
// Each object that reduces gradients uses one StepDivisor, and calls ScaleOf() for each of its
// steps, also for those that only accumulate. That of a Joinable is join_config().divisor.
//
// Threads: thread-safe. Calls are in the order of the steps; a step may have several calls.

#ifndef EVENKEEL_JOIN_STEP_DIVISOR_H_
#define EVENKEEL_JOIN_STEP_DIVISOR_H_

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

enum class DivideBy {
  // The number of ranks in the group, exhausted ranks included: if all batches have the same size,
  // every sample of an uneven loop has the same weight.
  kInitialWorldSize,
  // The number of ranks that have inputs in the step: the gradient is the mean of their gradients.
  kActiveRanks,
  // The number of samples (or tokens) of all ranks in the step; each rank's gradients are sums over
  // its samples. Samples of accumulated micro-steps count, also those that a rank had accumulated
  // when it became exhausted. Every sample has the same weight, whatever the batch sizes. Each rank
  // passes the number of its samples before each step: JoinScope::AddSamples(). If no rank has a
  // sample, the gradients are zeros. All steps of the loop count, so this does not suit models that
  // are trained in turns (the two of a GAN): each would be divided by the samples of both.
  kSamples,
};

class StepDivisor {
 public:
  // `initial_world_size`: for kInitialWorldSize; 0 means the world size of the step's group.
  explicit StepDivisor(DivideBy by = DivideBy::kInitialWorldSize, int initial_world_size = 0)
      : by_(by), initial_world_size_(initial_world_size) {}

  // Returns the factor for the sum: one over the step's divisor. `reduces`: this step reduces the
  // gradients accumulated so far.
  double ScaleOf(const StepAnswer& answer, bool reduces);
  DivideBy by() const { return by_; }
  // Resets the counts of samples. To be called before the first step in another group, when all
  // gradients have been reduced.
  void OnOtherGroup();

 private:
  const DivideBy by_;
  const int initial_world_size_;
  absl::Mutex mutex_;
  // The group's samples in earlier reductions.
  std::optional<int64_t> reduced_samples_ ABSL_GUARDED_BY(mutex_);
  int64_t last_step_ ABSL_GUARDED_BY(mutex_) = -1;
  double last_scale_ ABSL_GUARDED_BY(mutex_) = 1.0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEP_DIVISOR_H_
