// The divisor of the sum of the ranks' gradients, for each step.
//
//   EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, Notify());  // of a Joinable
//   EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
//   const double scale = join_config().divisor.ScaleOf(answer, join_name());
//
// Threads: immutable.

#ifndef EVENKEEL_JOIN_STEP_DIVISOR_H_
#define EVENKEEL_JOIN_STEP_DIVISOR_H_

#include <algorithm>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

enum class DivideBy {
  // The number of ranks in the group, exhausted ranks included: if all batches have the same size,
  // every sample of an uneven loop has the same weight.
  kInitialWorldSize,
  // The number of ranks that have inputs in the step: the gradient is the mean of their gradients.
  kActiveRanks,
  // The number of samples (or tokens) of all ranks in the step; each rank's gradients are sums over
  // its samples. Every sample has the same weight, whatever the batch sizes. Each rank passes the
  // number of its samples before each step: JoinScope::AddSamples(). Samples of accumulated
  // micro-steps count, also if the rank has become exhausted or another loop has begun since then;
  // if ParameterSet::ClearGradients() before a step drops their gradients, they do not. Gradients
  // that were accumulated where no number was passed are refused. If no rank has a sample, the sum
  // is not divided: of gradients that are sums over samples it is zero. Of several models, each
  // DataParallel counts those of its own steps. An optimizer without one counts all samples since
  // the last step, and refuses a step if accumulated gradients were cleared in the loop.
  kSamples,
};

class StepDivisor {
 public:
  explicit StepDivisor(DivideBy by = DivideBy::kInitialWorldSize) : by_(by) {}

  // Returns the factor for the sum: one over the step's divisor. `reducer`: the name of the
  // StepParticipant that reduces.
  double ScaleOf(const StepAnswer& answer, absl::string_view reducer) const {
    if (by_ == DivideBy::kInitialWorldSize) return 1.0 / answer.world_size;
    if (by_ == DivideBy::kActiveRanks) return 1.0 / answer.active;
    // Not 0 without samples: the scale also applies to the flags of gradients that exist.
    return 1.0 / static_cast<double>(std::max<int64_t>(answer.SamplesOf(reducer), 1));
  }
  DivideBy by() const { return by_; }

 private:
  DivideBy by_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEP_DIVISOR_H_
