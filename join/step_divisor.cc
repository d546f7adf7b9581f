#include "evenkeel/join/step_divisor.h"

#include <algorithm>
#include <cstdint>

namespace evenkeel {

double StepDivisor::ScaleOf(const StepAnswer& answer, absl::string_view reducer) const {
  switch (by_) {
    case DivideBy::kInitialWorldSize:
      return 1.0 / answer.world_size;
    case DivideBy::kActiveRanks:
      return 1.0 / answer.active;
    case DivideBy::kSamples:
      break;
  }
  // Not 0 without samples: the scale also applies to the flags of gradients that exist.
  return 1.0 / static_cast<double>(std::max<int64_t>(answer.SamplesOf(reducer), 1));
}

}  // namespace evenkeel
