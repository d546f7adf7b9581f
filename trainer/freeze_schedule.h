// Which parameters are frozen in which steps of a run.
//
//   EK_ASSIGN_OR_RETURN(const FreezeSchedule schedule, ParseFreezeSchedule("fc1@3:5,fc2.bias@0:"));
//   EK_RETURN_IF_ERROR(CheckFreezeSchedule(schedule, model->parameters()));
//   ApplyFreezeSchedule(schedule, /*step=*/3, model->parameters());     // fc1.weight, fc1.bias, fc2.bias are frozen
//
// `fc1@3:5` freezes every parameter whose name begins with "fc1" in steps 3 and 4; without the second number it stays
// frozen. Ranges of one parameter may overlap: it is frozen where any of them says so.
//
// Units:   steps of the group, counted from 0.
// Threads: pure functions.
// Errors:  InvalidArgument that quotes the part that is wrong.

#ifndef EVENKEEL_TRAINER_FREEZE_SCHEDULE_H_
#define EVENKEEL_TRAINER_FREEZE_SCHEDULE_H_

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
  int64_t end = std::numeric_limits<int64_t>::max();  // The first step in which it is trained again.
  friend bool operator==(const FreezeRange&, const FreezeRange&) = default;
};

using FreezeSchedule = std::vector<FreezeRange>;

// Empty text: nothing is ever frozen.
absl::StatusOr<FreezeSchedule> ParseFreezeSchedule(absl::string_view text);

// Each prefix matches a parameter.
absl::Status CheckFreezeSchedule(const FreezeSchedule& schedule, const ParameterSet& parameters);

// What `step` has frozen, by index in `parameters`.
std::vector<int> FrozenAt(const FreezeSchedule& schedule, int64_t step, const ParameterSet& parameters);

// The names of some of them: "fc1.weight, fc1.bias and 3 more".
std::string NamesOf(const std::vector<int>& indices, const ParameterSet& parameters);

// The names of the tensors that begin and that cease to be frozen; empty: none.
struct FreezeChange {
  std::string begun;
  std::string ended;
};
FreezeChange ChangeOf(const std::vector<int>& before, const std::vector<int>& after, const ParameterSet& parameters);

// Freezes what `step` has frozen and unfreezes the rest of what the schedule names; leaves other parameters alone.
void ApplyFreezeSchedule(const FreezeSchedule& schedule, int64_t step, ParameterSet& parameters);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_FREEZE_SCHEDULE_H_
