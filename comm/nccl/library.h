// NCCL itself, as internal/nccl_api.h has it.
//
// Reads what NCCL reads of the environment to tell hosts apart: NCCL_HOSTID, and
// NCCL_MULTI_RANK_GPU_ENABLE (which 2.28 does not know). With NCCL_COMM_BLOCKING=1 nothing could
// have a deadline, so no communicator is made: kInvalidUsage.
//
// An NCCL that is loaded may be older than the one that this was built with, down to 2.18: what it
// lacks is done otherwise or answers kUnimplemented, as if it had been built with it.

#ifndef EVENKEEL_COMM_NCCL_LIBRARY_H_
#define EVENKEEL_COMM_NCCL_LIBRARY_H_

#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

NcclApi& NcclLibrary();  // Never destroyed.

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_LIBRARY_H_
