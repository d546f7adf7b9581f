// Reads and replaces the state of an Optimizer: in memory, in chunks, in checkpoints.
//
//   EK_ASSIGN_OR_RETURN(OptimizerState all, optimizer->Consolidate());     // on all ranks together
//   EK_RETURN_IF_ERROR(optimizer->LoadState(all));
//
//   EK_RETURN_IF_ERROR(optimizer->Save("checkpoints/last"));               // each rank its part
//   EK_RETURN_IF_ERROR(optimizer->Load("checkpoints/last"));
//
// A state has the moments, the master copies and the step counts. Parameters are saved by
// checkpoint/parameter_file.h. Every placement loads the state of every other one.
//
// Threads: see optimizer.h.
// Errors:  InvalidArgument for a state that does not fit, or that differs between the ranks (then
//          on all ranks). FailedPrecondition in the middle of an update, and inside RunJoined() for
//          calls that are not available there.

#ifndef EVENKEEL_ZERO_OPTIM_STATE_ACCESS_H_
#define EVENKEEL_ZERO_OPTIM_STATE_ACCESS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/zero_optim/checkpoint/pending_save.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

class StateAccess {
 public:
  // Returns the state of this rank; with Slices, of its ranges. Empty if a device has failed, which
  // the next Step() reports.
  virtual OptimizerState state() = 0;
  virtual int64_t state_bytes() const = 0;

  // Returns the state of all ranks on the rank `to`, or on all ranks; elsewhere it is empty. A
  // collective; inside RunJoined() only after Step(), and an exhausted rank `to` receives nothing.
  virtual absl::StatusOr<OptimizerState> Consolidate(int to = kAllRanks) = 0;
  // Passes the same state to `sink`, tensor by tensor, in chunks of at most `chunk` bytes (or one
  // element): no rank holds more than one chunk beside its own part. After an error of `sink` the
  // rest is received and dropped, and this rank returns the error.
  virtual absl::Status VisitState(int to, StateSink sink,
                                  Bytes chunk = Bytes{int64_t{64} << 20}) = 0;
  // Replaces all state by this rank's part of `state`, the complete state, equal on all ranks. A
  // collective, between steps, not inside RunJoined().
  virtual absl::Status LoadState(const OptimizerState& state) = 0;

  // Save() writes a checkpoint to a folder that all ranks can see, each rank its own part
  // (checkpoint.h). Load() reads it with any placement, at any world size. Collectives, between
  // steps. Inside RunJoined() Load() is refused; Save() works after Step() if the state is split.
  virtual absl::Status Save(const std::string& folder) = 0;
  virtual absl::Status Load(const std::string& folder) = 0;
  // Like Save(), but returns when this rank's part is copied; the copy is written beside the next
  // steps (checkpoint/pending_save.h). All ranks must make the same one of the two calls. Further
  // saves, the destructor and Recover() wait for it; after Recover() a save that was not complete
  // has failed. Memory: one copy of state_bytes(), kept for the next save
  // (checkpoint/checkpoint_writer.h).
  virtual absl::StatusOr<PendingSave> SaveAsync(const std::string& folder) = 0;
  // Returns this rank's part of a checkpoint, for a CheckpointWriter in a hook that exhausted ranks
  // run, too. Waits for the end of the step.
  virtual absl::StatusOr<StatePieces> Pieces() = 0;
  // Sets the path of the newest checkpoint, after each one that the optimizer did not write itself.
  virtual void SetCheckpointHint(absl::string_view hint) = 0;

 protected:
  ~StateAccess() = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_STATE_ACCESS_H_
