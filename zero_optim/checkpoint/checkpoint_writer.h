// Writes checkpoints (checkpoint.h) while the caller waits, or in the background from a copy.
//
//   CheckpointWriter writer;
//   ...
//   // on all ranks, between two steps; returns when the state is copied
//   const PendingSave save = writer.Start(*comm, params,
//                                         {.folder = "checkpoints/step_1000",
//                                          .name = optimizer->join_name(),
//                                          .state = optimizer->Pieces(),
//                                          .steps_finished = optimizer->steps_finished()});
//
// Optimizer::SaveAsync() is this for the optimizer alone. SaveHooks add files of your own: one
// manifest, or one rename, then covers all of them.
//
// A save is the same in both forms. On each rank: write own part -> send its description to rank 0
// -> wait for the result. On rank 0: begin -> wait for the parts -> write the manifest -> send the
// result. These are messages of the control plane from one rank to another, not collectives, so
// that a separate thread of each rank may exchange them while the steps run.
//
// Memory:  Start() needs memory for a copy of this rank's part, which it keeps for the next save;
//          none for state on a device, whose pieces are host copies already. The first save pays
//          for new memory unless Reserve() has taken it. WriteCheckpoint() takes no copy.
// Time:    Start() waits for the copy alone. The thread of the writer has a low priority.
// Order:   a collective: all ranks start the same saves in the same order. Saves of one writer run
//          one after the other: Start() first waits for the save before it, since both use the
//          memory of the copy; at most for a quarter of the group's timeout, after
//          which the new save fails on all ranks.
// Threads: thread-compatible. When Start() returns, the caller may change all state. The hooks run
//          on the writer's thread, one at a time; what they use must not change until the save is
//          done.
// Errors:  see PendingSave. If one rank fails, all get its error, the files of the save are
//          removed, and an older checkpoint in the folder stays. A lost rank ends the save, as it
//          ends the group, unless rank 0 has all parts already. The group outlives the save.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_WRITER_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/checkpoint/pending_save.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

namespace internal {
class WorkerThread;
}

// Additions to a save. Each may be null.
struct SaveHooks {
  // On rank 0, first: returns the folder for all ranks, in place of CheckpointToWrite::folder.
  std::function<absl::StatusOr<std::string>()> begin;
  // On each rank, after its part of the state: writes more files, and returns a text for finish().
  std::function<absl::StatusOr<std::string>(const std::string& folder)> write;
  // On rank 0, last, when the manifest and the files of all ranks are on the disk: gets the texts,
  // by rank. After its error the manifest is removed.
  std::function<absl::Status(const std::vector<std::string>& texts)> finish;
  // On each rank, last: gets its result.
  std::function<void(const absl::Status& result)> end;
};

struct CheckpointToWrite {
  std::string folder;
  std::string name;                   // The object's name, equal on all ranks.
  absl::StatusOr<StatePieces> state;  // This rank's; those of all ranks must cover each tensor
                                      // exactly once. An error fails the save on all ranks.
  int64_t steps_finished = 0;
  SaveHooks hooks;
};

// Writes a checkpoint, and waits for it. A collective.
absl::Status WriteCheckpoint(Communicator& comm, const ParameterSet& params,
                             CheckpointToWrite checkpoint);

class CheckpointWriter {
 public:
  CheckpointWriter();
  ~CheckpointWriter();  // Waits for the last save.
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Starts a save, and returns when its state is copied. `more`: further tensors for the hooks;
  // they are copied, too, and then refer to their copies, which are valid until the save is done.
  PendingSave Start(Communicator& comm, const ParameterSet& params, CheckpointToWrite checkpoint,
                    absl::Span<TensorView* const> more = {});

  // Takes the memory for copies of these tensors in the background, so that the first Start() does
  // not wait for it. Optional; once, before the first Start(), and not a collective.
  void Reserve(absl::Span<const TensorView> tensors);

  // Returns the save that was started last.
  const PendingSave& last() const { return last_; }
  // Returns the bytes of the memory for copies.
  int64_t copy_bytes() const { return copy_bytes_; }

 private:
  absl::Status Allocate(int64_t bytes);
  absl::Status Copy(absl::Span<TensorView* const> tensors);

  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte[], Free> copy_;
  std::atomic<int64_t> copy_bytes_ = 0;
  PendingSave last_;
  const std::unique_ptr<internal::WorkerThread>
      thread_;  // Last: its destructor runs the rest of a save.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_WRITER_H_
