// The actions of an optimizer in a step, so that an exhausted rank can repeat them. A StepMessage
// has everything that makes one optimizer step.
//
//   StepMessage step{
//       .rules = groups.rules(), .options = options, .sources = {GradientSource::kHere, ...}};
//   EK_RETURN_IF_ERROR(ActionHook<OptimizerAction>::Announce(*this, step));
//   EK_RETURN_IF_ERROR(step.CheckFor(params));  // on an exhausted rank, which has received it
//
// Serialize() and Parse() alone pass an optimizer's settings from one rank to others.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_

#include <cstdint>
#include <string>
#include <variant>
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

// The settings of a step, as the ranks compare them (join/steps/step_ledger.h):
// "learning_rate=0.001, max_norm=1". What can't change from step to step is left out, and so is
// what has its default. Rates of more than eight groups are hashed.
std::string SettingsText(const ParameterGroups& groups, const std::vector<UpdateRule>& rules,
                         const StepOptions& options = {});

struct StepMessage {
  std::vector<UpdateRule> rules;  // By group.
  StepOptions options;
  std::vector<GradientSource> sources;  // By parameter.
  // In a step with exhausted ranks, by parameter: of its value and of its gradient (0: none that
  // all ranks have) as the step finds them. Else empty.
  std::vector<uint64_t> hashes;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.rules, self.options.grad_scale, self.options.skip, self.options.skip_nonfinite,
          self.options.clip, self.hashes, visit.EachUpTo(self.sources, GradientSource::kToReduce));
  }
  std::string Serialize() const;
  // Returns InvalidArgument for bytes that are not a valid step.
  static absl::StatusOr<StepMessage> Parse(absl::string_view bytes, int param_count);
  // Returns InvalidArgument if the step is not valid for that number of parameters.
  absl::Status CheckFor(int param_count) const;

  friend bool operator==(const StepMessage&, const StepMessage&) = default;
};

struct CheckAction {  // CheckGradients().
  StepMessage step;
  static void VisitFields(auto& self, auto& visit) { visit(self.step); }
};
struct RebalanceAction {};
struct SaveAction {
  bool is_async = false;
  std::string folder;
  static void VisitFields(auto& self, auto& visit) { visit(self.is_async, self.folder); }
};
struct VisitAction {  // VisitState().
  int32_t to = 0;
  int64_t chunk_bytes = 0;
  static void VisitFields(auto& self, auto& visit) { visit(self.to, self.chunk_bytes); }
};
using OptimizerAction =
    std::variant<StepMessage, CheckAction, RebalanceAction, SaveAction, VisitAction>;

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_STEP_MESSAGE_H_
