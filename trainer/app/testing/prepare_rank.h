// Prepares a rank as TrainRank() does, but without the agreements of the ranks.
//
//   EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, data, rank, world_size));

#ifndef EVENKEEL_TRAINER_APP_TESTING_PREPARE_RANK_H_
#define EVENKEEL_TRAINER_APP_TESTING_PREPARE_RANK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/training_data.h"

namespace evenkeel {

inline absl::StatusOr<RankSetup> PrepareRank(
    const TrainOptions& options, const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
    int rank, int world_size) {
  EK_ASSIGN_OR_RETURN(RankSetup setup, CheckRank(options, data, rank, world_size));
  EK_RETURN_IF_ERROR(MakeModel(options, rank, setup));
  return setup;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TESTING_PREPARE_RANK_H_
