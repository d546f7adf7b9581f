// A schedule of the steps of a run in which parameters are frozen.
//
//   EK_ASSIGN_OR_RETURN(const FreezeSchedule schedule, ParseFreezeSchedule("fc1@3:5,fc2.bias@0:"));
//   EK_RETURN_IF_ERROR(CheckFreezeSchedule(schedule, model->parameters()));
//   // fc1.weight, fc1.bias, fc2.bias are frozen
//   ApplyFreezeSchedule(schedule, /*step=*/3, model->parameters());
//
// `fc1@3:5` freezes every parameter whose name begins with "fc1" in steps 3 and 4; without the
// second number it stays frozen. Ranges of one parameter may overlap: it is frozen where any of
// them applies.
//
// Units:   steps of the group, counted from 0.
// Threads: pure functions.
// Errors:  InvalidArgument, which quotes the invalid part.

#ifndef EVENKEEL_TRAINER_APP_FREEZE_SCHEDULE_H_
#define EVENKEEL_TRAINER_APP_FREEZE_SCHEDULE_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"

namespace evenkeel {

struct FreezeRange {
  std::string prefix;
  int64_t begin = 0;
  int64_t end =
      std::numeric_limits<int64_t>::max();  // The first step in which it is trained again.
  friend bool operator==(const FreezeRange&, const FreezeRange&) = default;
};

using FreezeSchedule = std::vector<FreezeRange>;

// Parses a schedule. An empty text freezes nothing.
absl::StatusOr<FreezeSchedule> ParseFreezeSchedule(absl::string_view text);

// Returns OK if each prefix matches a parameter.
absl::Status CheckFreezeSchedule(const FreezeSchedule& schedule, const ParameterSet& parameters);

// Returns the indices in `parameters` of those that are frozen in `step`.
std::vector<int> FrozenAt(const FreezeSchedule& schedule, int64_t step,
                          const ParameterSet& parameters);

// Returns the names of some of them: "fc1.weight, fc1.bias and 3 more".
std::string NamesOf(const std::vector<int>& indices, const ParameterSet& parameters);

// The names of the tensors that begin and cease to be frozen; empty: none.
struct FreezeChange {
  std::string begun;
  std::string ended;
};
// Replaces `frozen`, the indices of the step before, by those of `step`.
FreezeChange UpdateFrozen(const FreezeSchedule& schedule, int64_t step,
                          const ParameterSet& parameters, std::vector<int>& frozen);

// Freezes the parameters that are frozen in `step`, unfreezes the other ones that the schedule
// names, and leaves the rest alone.
void ApplyFreezeSchedule(const FreezeSchedule& schedule, int64_t step, ParameterSet& parameters);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_FREEZE_SCHEDULE_H_
