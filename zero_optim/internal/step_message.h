// Everything that makes one optimizer step, so that a rank without inputs can take the same one.
//
//   StepMessage step{
//       .rules = groups.rules(), .options = options, .sources = {GradientSource::kHere, ...}};
//   StepControl::Of(comm).Announce(join_name(), step.Serialize());  // on the lowest active rank
//   EK_ASSIGN_OR_RETURN(StepMessage step, StepMessage::Parse(payload, params));  // on a joined one

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

// InvalidArgument for a number that is out of its range.
absl::Status CheckOptions(const StepOptions& options);

// Where a step finds the gradient of a parameter.
enum class GradientSource : uint8_t {
  kNone,      // There is none: the parameter is left alone.
  kHere,      // The group's gradient is in the parameter's gradient memory.
  kToReduce,  // Ranks hold their own, or none; the optimizer reduces them.
};

// The settings of a step, as the ranks compare them (comm/step_ledger.h): "learning_rate=0.001,
// max_norm=1". What can't change from step to step is left out, and so is what has its default.
// Rates of more than eight groups are hashed.
std::string SettingsText(const ParameterGroups& groups, const std::vector<UpdateRule>& rules,
                         const StepOptions& options = {});

struct StepMessage {
  std::vector<UpdateRule> rules;  // By group.
  StepOptions options;
  std::vector<GradientSource> sources;  // By parameter.
  // In a step with exhausted ranks, by parameter: of its value and of its gradient (0: none that
  // all ranks have) as the step finds them. Else empty.
  std::vector<uint64_t> hashes;

  std::string Serialize() const;
  // InvalidArgument for what Serialize() with `param_count` sources can't have made.
  static absl::StatusOr<StepMessage> Parse(absl::string_view bytes, int param_count);

  friend bool operator==(const StepMessage&, const StepMessage&) = default;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_
