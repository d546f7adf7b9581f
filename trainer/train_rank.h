// One rank's run from the first agreement to the last line.
//
//   const auto data = LoadTrainingData(options.data);
//   const TrainResult result = TrainRank(comm, options, data, {.out = stdout, .log = stderr});
//
// All ranks call it, each with what loading the data gave. Rank 0 alone prints to `out`, and writes the files that the
// options name.
//
// The group goes on: finalize it. But with options.goes_on (--on_failure=continue) it has ended when this returns, well
// if the status is OK: a rank that is lost on the way, or that fails, ends with its error, and the others make a group
// of their own and go on. Who is rank 0 there does then what rank 0 did; a line in `log` says who is lost, and from
// which step on the training is repeated.

#ifndef EVENKEEL_TRAINER_TRAIN_RANK_H_
#define EVENKEEL_TRAINER_TRAIN_RANK_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/train_streams.h"
#include "evenkeel/trainer/training_data.h"

namespace evenkeel {

struct TrainResult {
  absl::Status status;
  // The same failure on every rank, which all know of. The group still works.
  bool is_common = false;
  // True if this rank reports the failure. A failure common to all is reported by rank 0 of the group that is left.
  bool reports = true;
  // The run was told to stop (trainer/checkpoint/stop_signals.h).
  bool was_stopped = false;
};

TrainResult TrainRank(Communicator& comm, const TrainOptions& options,
                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, const TrainStreams& streams);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAIN_RANK_H_
