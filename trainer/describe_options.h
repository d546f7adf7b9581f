// What a run is, in the words that its lines and its report use.
//
//   DescribeSharding(options.sharding)        // "state sharded in equal slices"
//   DescribeDecay(options.decay)              // " with linear decay": follows the optimizer
//   DescribeJoin(options, plan)               // "uneven, joined, every sample weighs the same"
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_DESCRIBE_OPTIONS_H_
#define EVENKEEL_TRAINER_DESCRIBE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"

namespace evenkeel {

absl::string_view DescribeSharding(Sharding sharding);
absl::string_view DescribeDecay(Decay decay);
std::string DescribeJoin(const TrainOptions& options, const StepPlan& plan);
int64_t CountElements(const Model& model);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DESCRIBE_OPTIONS_H_
