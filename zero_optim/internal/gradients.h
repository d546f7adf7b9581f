// Decides from the states of the gradients what a step does with each.
//
//   EK_ASSIGN_OR_RETURN(step.sources, ChooseSources(params, groups, params.mask(),
//                                                   LocalGradients::kRefused, rank));
//
// Threads: pure functions of the parameter set.
// Errors:  FailedPrecondition that names the parameter and the rank.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENTS_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENTS_H_

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/parameter_groups.h"

namespace evenkeel::internal {

// The role of an unreduced gradient in a step.
enum class LocalGradients {
  kComplete,  // The group's gradient: there is one rank.
  kRefused,   // An error.
  kReduced,   // Something that the step reduces.
};

// By parameter. Trained is what is in a group, and trained now and in `mask`. When the step reduces
// anything, or has no reduced gradient at all, then every trained parameter without one is reduced,
// so that ranks may lack different gradients; except where a reduced one was cleared.
absl::StatusOr<std::vector<GradientSource>> ChooseSources(const ParameterSet& params,
                                                          const ParameterGroups& groups,
                                                          const TrainableMask& mask,
                                                          LocalGradients local, int rank);

// The elements of a parameter's gradient: of a sparse one those of its rows.
TensorView ElementsOf(const ParameterSet& params, int param);

// Returns whether a sum of flags, in the type of the gradients, is not +0.
bool IsSet(const TensorView& flag);

// On a rank without inputs: OK if each gradient that `sources` expects here has arrived.
absl::Status CheckArrived(const ParameterSet& params, std::span<const GradientSource> sources,
                          int rank);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENTS_H_
