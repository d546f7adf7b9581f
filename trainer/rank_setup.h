// What a rank needs to begin training, made and checked before any of it is used.
//
//   EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, LoadTrainingData(options.data), rank, world_size));
//
// What can be wrong with flags, data and files comes to light here: in the process that starts the ranks, too, so that
// the sentence about it is said once and nothing has been started.
//
// Threads: pure but for reading files.
// Errors:  InvalidArgument, or the file system's own: one sentence that names the flag or the file.

#ifndef EVENKEEL_TRAINER_RANK_SETUP_H_
#define EVENKEEL_TRAINER_RANK_SETUP_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_data.h"

namespace evenkeel {

struct RankSetup {
  std::shared_ptr<const TrainingData> data;
  std::unique_ptr<Model> model;  // On rank 0 as the file of --init has it; the others get that from rank 0.
  StepPlan plan;                 // Of a dry run, its few steps.
};

// `data` may be the error that loading gave: it is then the answer. Rank 0 alone reads --init and looks at the folders
// of the files that it is to write.
absl::StatusOr<RankSetup> PrepareRank(const TrainOptions& options,
                                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, int rank,
                                      int world_size);

// The model and its values on a device instead of the host.
absl::Status MoveToDevice(const TrainOptions& options, DeviceRuntime& runtime, Device device, RankSetup& setup);

// The plan of a whole run, and where this one takes over: `from` is the beginning, unless it is resumed.
absl::StatusOr<StepPlan> PlanOf(const TrainOptions& options, const TrainingData& data, int world_size,
                                const EpochPosition& from = {});

// All ranks together, each with what it found: OK if all are; else every rank gets the error of the lowest one that has
// one, with its rank if not all ranks say the same. The group goes on.
absl::Status AgreeOnSetup(Communicator& comm, const absl::Status& mine);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RANK_SETUP_H_
