#include "evenkeel/trainer/training_data.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/idx_dataset.h"

namespace evenkeel {

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(IdxDataset train, IdxDataset::Load(folder, Split::kTrain));
  EK_ASSIGN_OR_RETURN(IdxDataset test, IdxDataset::Load(folder, Split::kTest));
  if (train.size() == 0 || test.size() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, " has no samples to ", train.size() == 0 ? "train on" : "test with"));
  }
  return std::make_shared<const TrainingData>(
      TrainingData{std::make_unique<IdxDataset>(std::move(train)), std::make_unique<IdxDataset>(std::move(test))});
}

}  // namespace evenkeel
