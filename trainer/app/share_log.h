// The shares of a run with --balance, in a file: to repeat the run with the same bits.
//
//   // --balance_log: before training, then for each change
//   EK_ASSIGN_OR_RETURN(const ShareLog log, OpenShareLog(comm, options, /*first_step=*/0));
//   EK_RETURN_IF_ERROR(WriteShares("shares.jsonl", /*step=*/0, {32, 32}));
//   log.repeat;                            // of --balance_repeat
//
// The file has JSON lines. The first one names most of what the bits of a run depend on besides its
// flags: build, processor, ranks, threads, backend, seed and batch. Each other one has the number
// of the group's steps before a change, and the shares of whole batches from then on. A run that is
// started again adds its lines; those of steps that it repeats replace the earlier ones. A line is
// written at once, before the first step with its shares. The log ends with a loss of ranks. One
// run at a time writes to a file.
//
// Threads: OpenShareLog() is a collective. The other functions are for one thread at a time per
//          file.
// Errors:  those of the file system, with the path. OpenShareLog() reports on all ranks, also
//          InvalidArgument if the file is of another kind of run (with both values), has damaged
//          lines, or, to be repeated, has lost ranks or no shares; FailedPrecondition if another
//          run is writing to it. A last line that a killed run did not finish is ignored.

#ifndef EVENKEEL_TRAINER_APP_SHARE_LOG_H_
#define EVENKEEL_TRAINER_APP_SHARE_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/trainer/app/train_options.h"

namespace evenkeel {

struct ShareLog {
  std::vector<ShareChange> repeat;  // Empty without --balance_repeat.
  internal::UniqueFd lock;          // Rank 0: keeps other runs from --balance_log while it is open.
};

// A collective of runs with --balance, in which the paths of rank 0 count, and rank 0 alone uses
// the files. Begins --balance_log, and reads --balance_repeat for a run whose first step is
// `first_step`.
absl::StatusOr<ShareLog> OpenShareLog(Communicator& comm, const TrainOptions& options,
                                      int64_t first_step);

// Appends the shares of whole batches that are in force after `step` steps of the group. Called on
// rank 0.
absl::Status WriteShares(const std::string& path, int64_t step, const std::vector<int64_t>& shares);

// Called on the new rank 0 after a loss of ranks: writes the even shares of those that remain after
// `step` as the last line, with which the log cannot be repeated. Does nothing if there is no log
// on this host.
absl::Status EndShareLog(const Communicator& comm, const TrainOptions& options, int64_t step);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_SHARE_LOG_H_
