// One rank's arrival at an operation: writes the description of the operation and the location of
// its input to its seat, compares the descriptions of the other ranks, and finds their inputs.
//
//   if (!arrival.MayDescribe()) return;     // a rank may still read what this would replace
//   arrival.Describe();                     // the other ranks do not read it yet
//   // ... publish data that the last rank should find ...
//   arrival.Announce();
//   // again and again
//   EK_ASSIGN_OR_RETURN(const bool all_are_here, arrival.Meet());
//   // then
//   EK_RETURN_IF_ERROR(arrival.FindSources());
//
// Ownership: the task must outlive it; it keeps the memory that it has found alive.
// Threads:   thread-compatible.

#ifndef EVENKEEL_COMM_SHM_ARRIVAL_H_
#define EVENKEEL_COMM_SHM_ARRIVAL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/registered_memory.h"
#include "evenkeel/comm/shm/task.h"

namespace evenkeel::internal {

class ShmArrival {
 public:
  explicit ShmArrival(const ShmTask& task) : task_(task), lane_(task.lane) {}
  ShmArrival(const ShmArrival&) = delete;
  ShmArrival& operator=(const ShmArrival&) = delete;

  // Returns whether no rank reads this seat's old description any more.
  bool MayDescribe() const;
  // Writes the description. Large inputs in registered memory are not copied: the other ranks get
  // the memory.
  void Describe();
  bool is_registered() const { return registered_ != nullptr; }
  // Makes the description visible to the other ranks.
  void Announce();
  // Keeps other ranks from writing to this rank's input, if they may. Only the first call counts.
  void Fence();

  // Returns whether all ranks have arrived. Errors: FailedPrecondition if those that have disagree.
  absl::StatusOr<bool> Meet();
  bool Contributes(int seat) const { return (flags_[seat] & ShmGist::kContributes) != 0; }
  // Returns whether all inputs are in registered memory that any rank may write to.
  bool AreAllWritable() const;

  // Finds the inputs in registered memory, if this operation uses them; may be called again after
  // an error.
  // Errors: Internal for an invalid description; those of ShmMesh::Find(), for example because a
  //         rank has given up and freed its memory.
  absl::Status FindSources();
  // Returns whether a seat's input comes through its ring of slots; otherwise source() has it.
  bool IsStaged(int seat) const { return sources_.empty() || sources_[seat].empty(); }
  const TensorList& source(int seat) const { return sources_[seat]; }
  // Returns whether a rank gave up during this operation, so that this rank may have read its
  // memory after a change.
  bool MayBeGarbage() const;

 private:
  const ShmHeader& HeaderOf(int seat) const {
    return lane_.seats[seat].headers.Of(lane_.operations);
  }
  absl::Status DescribeDisagreement() const;
  void Register(ShmHeader& header);

  const ShmTask& task_;
  const ShmLane& lane_;
  std::shared_ptr<RegisteredMemory> registered_;  // Has the input, for the other ranks.
  int64_t exposed_offset_ = 0;
  bool is_exposed_ = false;                 // Other ranks may write to it.
  absl::InlinedVector<uint64_t, 8> flags_;  // By seat, from the gists.
  std::vector<std::shared_ptr<SharedMemory>> held_;
  std::vector<TensorList> sources_;  // By seat; empty if it is staged.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_ARRIVAL_H_
