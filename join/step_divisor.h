// By what the sum of the ranks' gradients is divided, step by step.
//
//   auto divisor = std::make_shared<StepDivisor>(DivideBy::kSamples);
//   ticket->OnAnswer([divisor](const absl::StatusOr<StepAnswer>& answer) {
//     if (answer.ok()) scale = divisor->ScaleOf(*answer, /*reduces=*/true);
//   });
//
// Whoever reduces gradients has one, and shows it each of its steps, those that only accumulate too. A Joinable finds
// its own in join_config().divisor.
//
// Threads: thread-safe; steps come in order, each as often as one likes.

#ifndef EVENKEEL_JOIN_STEP_DIVISOR_H_
#define EVENKEEL_JOIN_STEP_DIVISOR_H_

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/step_control.h"

namespace evenkeel {

enum class DivideBy {
  // The ranks of the group: with equal batches every sample weighs the same, to the end of an uneven loop.
  kInitialWorldSize,
  // The ranks that have inputs in the step: its batch is averaged, however many take part.
  kActiveRanks,
  // Gradients are sums over samples (or tokens), and are divided by all ranks' samples of the step: those of
  // accumulated micro-steps, and of what a rank had accumulated when it ran dry, included. Exact for batches of any
  // sizes. Each rank says before each step how many it has: JoinScope::AddSamples(). Without any sample in the group
  // the gradients are the sums that they are, of nothing: zeros. All steps of the loop count: not for models that take
  // turns (a GAN's two), each of which would be divided by the samples of the other's steps too.
  kSamples,
};

class StepDivisor {
 public:
  // `initial_world_size` 0: that of the step's group.
  explicit StepDivisor(DivideBy by = DivideBy::kInitialWorldSize, int initial_world_size = 0)
      : by_(by), initial_world_size_(initial_world_size) {}

  // What the sum is multiplied by in this step. `reduces`: the gradients that were accumulated up to here are reduced.
  double ScaleOf(const StepAnswer& answer, bool reduces);
  DivideBy by() const { return by_; }
  // The next step is another group's first: its counts begin anew. All gradients up to here have been reduced.
  void OnOtherGroup();

 private:
  const DivideBy by_;
  const int initial_world_size_;
  absl::Mutex mutex_;
  std::optional<int64_t> reduced_samples_ ABSL_GUARDED_BY(mutex_);  // Of the group, that went into earlier reductions.
  int64_t last_step_ ABSL_GUARDED_BY(mutex_) = -1;
  double last_scale_ ABSL_GUARDED_BY(mutex_) = 1.0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEP_DIVISOR_H_
