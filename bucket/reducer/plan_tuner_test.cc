#include "evenkeel/bucket/reducer/plan_tuner.h"

#include <vector>

#include "absl/time/time.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// A step with one gradient, whose reduction takes until `exposed` after it.
StepTimes Step(absl::Duration exposed) {
  const absl::Time begin = absl::UnixEpoch(), gradient = begin + absl::Milliseconds(1);
  return {.begin = begin,
          .first_gradient = gradient,
          .last_gradient = gradient,
          .end = gradient + exposed,
          .gradients = 1,
          .buckets = {{.ready = gradient, .launched = gradient, .reduced = gradient + exposed}}};
}

TEST(PlanTunerTest, RecordsNoMoreStepsThanItWasAskedFor) {
  constexpr int kSteps = 3;
  const std::vector<ParamSpec> specs = {{.count = 4}};
  const PlanState state{.mask = TrainableMask(1), .order = {0}, .order_final = true};
  BucketPlan plan;
  plan.buckets = {{0}};
  PlanTuner tuner("reducer", {}, kSteps);
  tuner.OnPlan(state, plan, specs);
  const auto record = [&](absl::Duration exposed) {
    const StepTimes step = Step(exposed);
    tuner.Record(step, state.order, std::vector<absl::Time>{step.first_gradient},
                 absl::Microseconds(1));
    tuner.EndStep();
  };
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_FALSE(tuner.IsDue());
    record(absl::Microseconds(10));
  }
  EXPECT_TRUE(tuner.IsDue());
  // The caps are chosen with the step's end, which an error may skip: the next step comes.
  record(absl::Seconds(1));
  record(absl::Seconds(1));
  EXPECT_TRUE(tuner.IsDue());
  EXPECT_DOUBLE_EQ(tuner.stats().measured_before_us, 10);
}

}  // namespace
}  // namespace evenkeel
