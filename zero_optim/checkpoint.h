// An optimizer's state on the disk: each rank writes what it has, and any number of ranks reads it again.
//
//   EK_RETURN_IF_ERROR(optimizer->Save("checkpoints/step_1000"));       // on all ranks together
//   ...
//   EK_RETURN_IF_ERROR(optimizer->Load("checkpoints/step_1000"));       // at any world size, sharded or not
//
// Any of Optimizer, ShardedOptimizer and SlicedOptimizer loads what any of them saved. A checkpoint is a folder that all
// ranks see, with a safetensors file per rank and manifest.json:
//
//   params   by name: how often it was updated; of each of its tensors the pieces [begin, count, file, offset], which
//            cover its elements exactly once: whole tensors, slices, whatever the ranks held. `offset` is where in the
//            file the piece's bytes begin, so that a reader needs no file's header
//   files    name, size and checksums of each file
//   checksum of all of the above
//
// The manifest is written last, when all files are on the disk: a checkpoint is complete or absent, and an older one in
// the same folder stays until the new one is complete. A reader reads the blocks of the files that have elements which
// it wants, no others, and believes them if their checksums are right; nobody holds more than its own part twice.
//
// For state that is held in another way, or hooks of your own, the functions below, and the optimizers' Pieces().
//
// Order:   writing is a collective call: all ranks, with equal folders.
// Threads: Checkpoint is immutable; several may read.
// Errors:  InvalidArgument, with a sentence, for a folder whose files contradict each other or the parameters; DataLoss
//          for damaged files, or another checkpoint's; the file system's own. If one rank can't write, all get its
//          error, and what they wrote is removed. If one can't read, all get its error, and nothing has changed.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/file_sums.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

// What manifest.json says. A value of its own, so that it can be looked at without any tensor.
struct CheckpointManifest {
  struct Piece {
    int64_t begin = 0, count = 0;  // Elements of the tensor.
    int file = 0;
    int64_t offset = 0;  // Of its bytes in the file.
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  struct Param {
    DType dtype = DType::kFloat32;
    int64_t count = 0;                                  // Elements of the parameter, and of each of its tensors.
    int64_t step = 0;                                   // Updates so far.
    std::map<std::string, std::vector<Piece>> tensors;  // In the order of their elements, all of them.
    friend bool operator==(const Param&, const Param&) = default;
  };
  struct File {
    std::string name;
    FileSums sums;
    friend bool operator==(const File&, const File&) = default;
  };
  int64_t steps_finished = 0;
  std::vector<File> files;
  std::map<std::string, Param> params;  // By name; those that were updated.

  std::string Serialize() const;
  // InvalidArgument unless it is one whose checksum is right, and its pieces cover each tensor exactly once.
  static absl::StatusOr<CheckpointManifest> Parse(absl::string_view json);

  friend bool operator==(const CheckpointManifest&, const CheckpointManifest&) = default;
};

// All ranks together. `mine`: the pieces that this rank has; those of all ranks cover each tensor exactly once. `name`
// is that of the object, equal on all ranks.
absl::Status WriteCheckpoint(const std::string& folder, absl::string_view name, Communicator& comm,
                             const ParameterSet& params, const StatePieces& mine, int64_t steps_finished);

class Checkpoint {
 public:
  // Local. InvalidArgument if it has state of a parameter that `params` does not have, or has with another size or
  // type.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder, const ParameterSet& params);

  const CheckpointManifest& manifest() const { return manifest_; }
  // Of the parameters that were updated, by index: how often.
  const std::map<int, int64_t>& steps() const { return steps_; }

  // Fills the memory of the pieces with their elements, which may lie in any number of files.
  absl::Status Read(absl::Span<const StatePiece> into) const;
  // The state of those elements that `wants` names, in tensors of just so many; nothing of a parameter without.
  using Wanted = absl::FunctionRef<std::optional<StateRange>(int param)>;
  absl::StatusOr<OptimizerState> ReadState(Wanted wants) const;
  absl::StatusOr<OptimizerState> ReadState() const;  // All of it.

 private:
  absl::StatusOr<const std::vector<CheckpointManifest::Piece>*> PiecesOf(const std::string& param,
                                                                         const std::string& tensor) const;

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<std::pair<std::string, int64_t>> params_;  // Names and sizes, by index.
  std::map<int, int64_t> steps_;
};

// All ranks together: opens it on each, and reads what `wants` says there. If one can't, or the ranks see different
// checkpoints, all get an error.
struct LoadedCheckpoint {
  OptimizerState state;
  std::map<int, int64_t> steps;  // Of all parameters.
  int64_t steps_finished = 0;
};
absl::StatusOr<LoadedCheckpoint> ReadCheckpoint(const std::string& folder, absl::string_view name, Communicator& comm,
                                                const ParameterSet& params, Checkpoint::Wanted wants);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_H_
