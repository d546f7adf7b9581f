// The two data sets of a run, loaded once and shared by all ranks of a process.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<const TrainingData> data, LoadTrainingData(kFashionMnistFolder));
//   data->train->size()
//
// Threads: immutable.
// Errors:  those of IdxDataset::Load; InvalidArgument for a data set without samples.

#ifndef EVENKEEL_TRAINER_TRAINING_DATA_H_
#define EVENKEEL_TRAINER_TRAINING_DATA_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/dataset.h"

namespace evenkeel {

struct TrainingData {
  std::unique_ptr<const Dataset> train;
  std::unique_ptr<const Dataset> test;
};

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAINING_DATA_H_
