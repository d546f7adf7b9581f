// Descriptions of a run, for its output, its report and its checkpoints.
//
//   DescribeSharding(options.sharding)        // "state sharded in equal slices"
//   DescribeDecay(options.decay)              // " with linear decay": follows the optimizer
//   DescribeJoin(options, plan)               // "uneven, joined, every sample weighs the same"
//   SettingsOf(options, model, data, ranks)   // stored in checkpoints
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_APP_DESCRIBE_OPTIONS_H_
#define EVENKEEL_TRAINER_APP_DESCRIBE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

absl::string_view DescribeSharding(Sharding sharding);
absl::string_view DescribeDecay(Decay decay);
std::string DescribeJoin(const TrainOptions& options, const StepPlan& plan);
int64_t CountElements(const Model& model);
RunSettings SettingsOf(const TrainOptions& options, const Model& model, const TrainingData& data,
                       int world_size);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_DESCRIBE_OPTIONS_H_
