// Parameters in memory of the group's transport, so that other ranks read updated values where they lie.
//
//   EK_ASSIGN_OR_RETURN(const Memory memory, MoveValues(comm, params));
//
// All values are moved into one block of comm.Allocate(): a sharded optimizer sends many of them at once, which shm
// does with one copy instead of three if all lie in one block. Elsewhere nothing is gained or lost.
//
// Layout:    in the set's order, each value at a multiple of 64 bytes, on a device of 256. Left where they are: ignored
//            parameters, empty ones, and those on another device than the group's.
// Ownership: the caller keeps the answer as long as anybody uses the values: it may outlive the communicator. Where the
//            values were is the caller's, and unused from here on.
// Threads:   that of the set. No other rank is waited for; a device is, so that the memory before may go.
// Errors:    of Allocate(), or of the device; nothing is changed then. FailedPrecondition if the set has no stream
//            there.

#ifndef EVENKEEL_BUCKET_VALUE_MEMORY_H_
#define EVENKEEL_BUCKET_VALUE_MEMORY_H_

#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// Between two steps, as ParameterSet::Rebind(); best before the first.
absl::StatusOr<Memory> MoveValues(Communicator& comm, ParameterSet& params);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_VALUE_MEMORY_H_
