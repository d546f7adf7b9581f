// NCCL itself, behind the interface of api.h.
//
// Reads what NCCL reads of the environment to tell hosts apart: NCCL_HOSTID, and
// NCCL_MULTI_RANK_GPU_ENABLE (which 2.28 does not know). With NCCL_COMM_BLOCKING=1 nothing could
// have a deadline, so no communicator is made: kInvalidUsage. Reads EVENKEEL_NCCL, the path of the
// library to load (comm/environment.h).
//
// The library may be any from 2.18 on, older or newer than the nccl.h of the build: what it lacks
// is done otherwise, or returns kUnimplemented.

#ifndef EVENKEEL_COMM_NCCL_LIBRARY_H_
#define EVENKEEL_COMM_NCCL_LIBRARY_H_

#include "absl/status/statusor.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

// Loads NCCL at the first call (functions.h), and returns the same object from then on; it is never
// destroyed. An error is not kept: the next call tries again.
// Threads: safe from any thread.
absl::StatusOr<NcclApi*> NcclLibrary();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_LIBRARY_H_
