// One rank's run from the first agreement to the last line. The group goes on: finalize it.
//
//   const auto data = LoadTrainingData(options.data_dir);
//   const TrainResult result = TrainRank(comm, options, data, stdout);
//
// All ranks call it, each with what loading the data gave. Rank 0 alone prints to `out`, and writes the files that the
// options name.

#ifndef EVENKEEL_TRAINER_TRAIN_RANK_H_
#define EVENKEEL_TRAINER_TRAIN_RANK_H_

#include <cstdio>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_data.h"

namespace evenkeel {

struct TrainResult {
  absl::Status status;
  // The same failure on every rank, found before training: one of them may speak for all. The group still works.
  bool is_common = false;
};

TrainResult TrainRank(Communicator& comm, const TrainOptions& options,
                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, std::FILE* out);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAIN_RANK_H_
