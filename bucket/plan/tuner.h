// Chooses bucket caps from measurements of some steps: pure functions, so that ranks with the same
// profiles choose the same caps.
//
//   StepProfile mine = MedianOf(profiles_of_my_steps);
//   StepProfile group = Combined(profiles_of_the_active_ranks);
//   EK_ASSIGN_OR_RETURN(CapChoice choice,
//                       ChooseCaps(specs, order, now, group.ready_ns, FitLink(samples)));
//
// Candidates are the caps in use, a grid of first and further caps, filled from either end, and the
// partition of the ready order that is best for the model (`cost_model.h`), as a list of one cap
// per bucket. The one with the shortest predicted exposed communication wins; a candidate that
// comes later must be better by a fiftieth.
//
// Units:   nanoseconds, bytes.
// Threads: pure functions.
// Source:  Sergeev and Del Balso, "Horovod", 2018, tunes its fusion threshold by trial; here a
//          model is fitted instead.

#ifndef EVENKEEL_BUCKET_PLAN_TUNER_H_
#define EVENKEEL_BUCKET_PLAN_TUNER_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/cost_model.h"
#include "evenkeel/bucket/plan/planner.h"

namespace evenkeel {

// The profile of steps on one rank, or on several.
struct StepProfile {
  std::vector<int64_t>
      ready_ns;  // Per parameter: the time of its gradient since the start of the step.
  std::vector<int64_t> bucket_ns;  // Per bucket, from when it was launched and the one before it
                                   // reduced, until it was.
  int64_t launch_ns = 0;           // The time of one launch on the thread that runs backward.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.ready_ns, self.bucket_ns, self.launch_ns);
  }
  std::string Serialize() const;
  // InvalidArgument for bytes that are not a profile with these numbers of parameters and buckets.
  static absl::StatusOr<StepProfile> Parse(absl::string_view bytes, int param_count,
                                           int bucket_count);

  friend bool operator==(const StepProfile&, const StepProfile&) = default;
};

// Returns the median of each number of one rank's steps, of which there is at least one.
StepProfile MedianOf(std::span<const StepProfile> steps);

// Combines the profiles of ranks. A bucket is sent when the last rank has it, so a gradient is
// ready when all ranks have it; and the last rank measures the time of a reduction without waiting.
StepProfile Combined(std::span<const StepProfile> profiles);

struct CapChoice {
  std::vector<Bytes> caps;
  CapOrder cap_order = CapOrder::kFromFirstReady;
  Prediction before;  // With the caps in use.
  Prediction after;   // With these.
};

// `order`: the parameters to plan, in gradient-ready order; `now`: the caps in use and their order.
absl::StatusOr<CapChoice> ChooseCaps(std::span<const ParamSpec> specs, std::span<const int> order,
                                     const PlanOptions& now, std::span<const int64_t> ready_ns,
                                     const LinkCost& link);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_TUNER_H_
