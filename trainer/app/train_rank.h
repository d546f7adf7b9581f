// Runs one rank from the first agreement to the last line of output.
//
//   const auto data = LoadTrainingData(options.data);
//   const TrainResult result = TrainRank(comm, options, data, {.out = stdout, .log = stderr});
//
// All ranks call it, each with its result of loading the data. Only rank 0 prints to `out` and
// writes the files that the options name.
//
// The group is still usable afterwards, and the caller finalizes it. With options.goes_on
// (--on_failure=continue) the group has ended when the call returns, without an error if the status
// is OK: a rank that is lost or fails ends with its error, and the others form a new group and
// continue. Its rank 0 takes over the duties of rank 0; a line in `log` names the lost ranks and
// the step from which training is repeated.

#ifndef EVENKEEL_TRAINER_APP_TRAIN_RANK_H_
#define EVENKEEL_TRAINER_APP_TRAIN_RANK_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/app/run_output.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/training_data.h"

namespace evenkeel {

struct TrainResult {
  absl::Status status;
  // The failure is the same on every rank, by agreement. The group still works.
  bool is_common = false;
  // True if this rank reports the failure. A failure common to all is reported by rank 0 of the
  // remaining group.
  bool reports = true;
  // The run was told to stop (trainer/checkpoint/stop_signals.h).
  bool was_stopped = false;
};

TrainResult TrainRank(Communicator& comm, const TrainOptions& options,
                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
                      const TrainStreams& streams);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TRAIN_RANK_H_
