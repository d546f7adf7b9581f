// Moves parameters to memory of the group's transport, so that other ranks read updated values in
// place.
//
//   EK_ASSIGN_OR_RETURN(const Memory memory, MoveValues(comm, params));
//
// All values are moved into one block of comm.Allocate(): an optimizer with split state sends many
// of them at once, for which shm needs one copy instead of three if all are in one block. Other
// backends neither gain nor lose.
//
// Layout:    in the set's order, each value aligned to 64 bytes, on a device to 256. Ignored
//            parameters, empty ones, and those on another device than the group's are not moved.
// Ownership: the caller keeps the result while the values are used; it may outlive the
//            communicator. The old memory belongs to the caller and is not used any more.
// Threads:   that of the set. Waits for no other rank, but for the device, so that the old memory
//            may be freed.
// Errors:    those of Allocate() or of the device, without a change. FailedPrecondition if the set
//            has no stream on the device.

#ifndef EVENKEEL_BUCKET_VALUE_MEMORY_H_
#define EVENKEEL_BUCKET_VALUE_MEMORY_H_

#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// To be called between two steps, as ParameterSet::Rebind(); best before the first.
absl::StatusOr<Memory> MoveValues(Communicator& comm, ParameterSet& params);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_VALUE_MEMORY_H_
