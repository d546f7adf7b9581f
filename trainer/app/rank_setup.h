// Creates and checks everything that a rank needs to begin training.
//
//   EK_ASSIGN_OR_RETURN(RankSetup setup,
//                       CheckRank(options, LoadTrainingData(options.data), rank, world_size));
//   EK_RETURN_IF_ERROR(MakeModel(options, rank, setup));
//
// CheckRank() finds all errors in flags, data and files. The process that starts the ranks calls it
// first, so that an error is reported once and before any rank is started.
//
// Threads: pure functions, apart from reading files.
// Errors:  InvalidArgument, or the file system's own; they name the flag or the file.

#ifndef EVENKEEL_TRAINER_APP_RANK_SETUP_H_
#define EVENKEEL_TRAINER_APP_RANK_SETUP_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/report/sample_log.h"

namespace evenkeel {

struct RankSetup {
  std::shared_ptr<const TrainingData> data;
  std::unique_ptr<Model>
      model;  // On rank 0 with the weights of --init; the other ranks get them from rank 0.
  StepPlan plan;
  std::vector<ShareChange> repeat;        // From OpenShareLog(); empty: shares are measured.
  std::unique_ptr<SampleLog> sample_log;  // Null without --sample_log.
};

// Checks everything of one rank, and makes a plan of its model, which takes no memory (model.h).
// `data` may be the error of loading, which is then returned. Only rank 0 reads the header of
// --init and checks that its output files can be written; in a dry run no folder is created.
absl::StatusOr<RankSetup> CheckRank(const TrainOptions& options,
                                    const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
                                    int rank, int world_size);
// Replaces the plan by the model.
absl::Status MakeModel(const TrainOptions& options, int rank, RankSetup& setup);

// Moves the model and its values from the host to a device.
absl::Status MoveToDevice(const TrainOptions& options, DeviceRuntime& runtime, Device device,
                          RankSetup& setup);

// Returns the plan of a whole run, which begins at `from`: the first step, unless the run is
// resumed.
absl::StatusOr<StepPlan> PlanOf(const TrainOptions& options, const TrainingData& data,
                                int world_size, const EpochPosition& from = {});

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_RANK_SETUP_H_
