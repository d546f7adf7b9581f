// Checkpoints of an optimizer's state: each rank writes its part, and any number of ranks reads it.
//
//   EK_RETURN_IF_ERROR(optimizer->Save("checkpoints/step_1000"));       // a collective
//   // the same in the background (pending_save.h)
//   EK_ASSIGN_OR_RETURN(const PendingSave save, optimizer->SaveAsync("checkpoints/step_2000"));
//   ...
//   // at any world size, with any placement
//   EK_RETURN_IF_ERROR(optimizer->Load("checkpoints/step_1000"));
//
// A checkpoint is a folder that all ranks can see, with a safetensors file per rank and
// manifest.json:
//
//   params    by name: the number of updates; and for each state tensor the pieces [begin, count,
//             file, offset], which cover its elements exactly once. `offset` is the position of the
//             piece's bytes in the file, so that a reader does not need the file's header
//   files     name, size and checksums of each file
//   checksum  of all of the above
//
// The manifest is written last, when all files are on the disk: a checkpoint is complete or absent,
// and an older one in the same folder stays until the new one is complete. A reader reads only the
// blocks of the files that contain its elements, and verifies their checksums; no rank holds more
// than its own part twice.
//
// For other kinds of state, or your own hooks, use checkpoint_writer.h, the functions below and
// Optimizer::Pieces().
//
// Threads: Checkpoint is immutable; several may read.
// Errors:  InvalidArgument for a folder whose files contradict each other or the parameters;
//          DataLoss for damaged files or files of another checkpoint; errors of the file system. If
//          one rank cannot write, all return its error, and the written files are removed. If one
//          cannot read, all return its error, without a change.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_H_

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
#include "evenkeel/files/file_sums.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

// The contents of manifest.json, as a value that can be read without any tensor.
struct CheckpointManifest {
  static constexpr char kFile[] = "manifest.json";

  struct Piece {
    int64_t begin = 0, count = 0;  // Elements of the tensor.
    int file = 0;
    int64_t offset = 0;  // The position of its bytes in the file.
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  struct Param {
    DType dtype = DType::kFloat32;
    int64_t count = 0;  // Elements of the parameter, and of each of its tensors.
    int64_t step = 0;   // Updates so far.
    std::map<std::string, std::vector<Piece>>
        tensors;  // The pieces of each, in the order of their elements.
    friend bool operator==(const Param&, const Param&) = default;
  };
  struct File {
    std::string name;
    FileSums sums;
    friend bool operator==(const File&, const File&) = default;
  };
  int64_t steps_finished = 0;
  std::vector<File> files;
  std::map<std::string, Param> params;  // By name; only updated ones.

  std::string Serialize() const;
  // InvalidArgument unless the checksum is right and the pieces cover each tensor exactly once.
  static absl::StatusOr<CheckpointManifest> Parse(absl::string_view json);

  friend bool operator==(const CheckpointManifest&, const CheckpointManifest&) = default;
};

class Checkpoint {
 public:
  // Opens a checkpoint; not a collective. InvalidArgument if it has a parameter that is not in
  // `params`, or has another size or type there.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder, const ParameterSet& params);

  const CheckpointManifest& manifest() const { return manifest_; }
  // Returns the number of updates, by index, of the parameters that were updated.
  const std::map<int, int64_t>& steps() const { return steps_; }

  // Reads the elements of the pieces into their memory, from any number of files.
  absl::Status Read(absl::Span<const StatePiece> into) const;
  // Returns the state of the elements in `wants`, in tensors of that size; a parameter without
  // elements has no entry.
  using Wanted = absl::FunctionRef<std::optional<StateRange>(int param)>;
  absl::StatusOr<OptimizerState> ReadState(Wanted wants) const;
  absl::StatusOr<OptimizerState> ReadState() const;  // All of it.

 private:
  absl::StatusOr<const std::vector<CheckpointManifest::Piece>*> PiecesOf(
      const std::string& param, const std::string& tensor) const;

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<std::pair<std::string, int64_t>> params_;  // Names and sizes, by index.
  std::map<int, int64_t> steps_;
};

// Opens the checkpoint on each rank, and reads the elements in its `wants`. A collective: if one
// rank fails, or the ranks see different checkpoints, all return an error.
struct LoadedCheckpoint {
  OptimizerState state;
  std::map<int, int64_t> steps;  // By parameter, for all parameters.
  int64_t steps_finished = 0;
};
absl::StatusOr<LoadedCheckpoint> ReadCheckpoint(const std::string& folder, absl::string_view name,
                                                Communicator& comm, const ParameterSet& params,
                                                Checkpoint::Wanted wants);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_CHECKPOINT_H_
