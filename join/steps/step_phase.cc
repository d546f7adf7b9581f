#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

absl::string_view NameOf(StepPhase phase) {
  static constexpr absl::string_view kNames[kStepPhases] = {
      "outside of the step", "input", "forward", "backward", "optimizer", "saving"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace evenkeel
